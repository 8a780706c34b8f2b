// Threads that compute a token together. They wait for each other by spinning for some microseconds, and then sleep: a thread
// that waits for one that another program has pushed aside leaves it the core.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace {

typedef std::chrono::steady_clock Clock;

inline void pause_a_moment() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// A number that threads wait for to change.
class Bell {
 public:
  uint32_t number() const { return value.load(std::memory_order_acquire); }

  void ring(uint32_t next) {
    value.store(next);
    if (sleepers.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    changed.notify_all();
  }

  // Wait until the number is not `seen`, and return the time asleep.
  Clock::duration wait(uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (number() != seen) return Clock::duration::zero();
      pause_a_moment();
    }
    const auto start = Clock::now();
    ++sleepers;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return value.load() != seen; });
    --sleepers;
    return Clock::now() - start;
  }

 private:
  alignas(64) std::atomic<uint32_t> value{0};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable changed;
};

class Pool;

// The threads that run a function, each of which computes its share.
struct Team {
  int64_t me, size;
  Pool* pool;
  void wait() const;
  std::pair<int64_t, int64_t> share(int64_t n) const { return {n * me / size, n * (me + 1) / size}; }
};

class Pool {
 public:
  // Run function(team) in `size` threads, or in this one alone if others compute here, or have kept this one waiting for more
  // of the time than they saved.
  template <class F>
  static void run(int64_t size, const F& function) {
    static std::mutex one_at_a_time;
    static Pool* pool = nullptr;
    const std::unique_lock<std::mutex> lock(one_at_a_time, std::try_to_lock);
    if (size <= 1 || !lock.owns_lock()) return function(Team{0, 1, nullptr});
    if (pool == nullptr || pool->process != getpid()) pool = new Pool;  // a fork has none of the threads
    pool->run_by(size, [](const void* f, const Team& team) { (*static_cast<const F*>(f))(team); }, &function);
  }

  // Wait until all threads of the team are here.
  void meet(int64_t me, int64_t size) {
    const uint32_t seen = meeting.number();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      meeting.ring(seen + 1);
      return;
    }
    const auto asleep = meeting.wait(seen, spins_at_work);
    if (me == 0) late += asleep;
  }

 private:
  typedef void (*Job)(const void*, const Team&);

  static constexpr int spins_at_work = 1000, spins_between = 2000, most_threads = 256;
  const pid_t process = getpid();
  Bell begin, meeting;  // `begin` counts the runs, and says the size of the team in its last digits
  std::atomic<int64_t> arrived{0};
  int64_t threads = 1;
  Job job = nullptr;
  const void* argument = nullptr;
  Clock::duration late{0}, rest{0};
  Clock::time_point together_from{};

  void run_by(int64_t size, Job todo, const void* of) {
    const auto start = Clock::now();
    size = std::min<int64_t>(size, most_threads - 1);
    if (start < together_from) return todo(of, Team{0, 1, nullptr});
    for (; threads < size; ++threads) std::thread(&Pool::serve, this, threads, begin.number()).detach();
    job = todo, argument = of, late = Clock::duration::zero();
    begin.ring((begin.number() / most_threads + 1) * most_threads + uint32_t(size));
    todo(of, Team{0, size, this});
    meet(0, size);
    // Alone, it takes at most `size` times what this thread has computed; so long, another try waits.
    const auto end = Clock::now();
    const Clock::duration shortest = std::chrono::milliseconds(4), longest = std::chrono::milliseconds(256);
    if (late * size <= (end - start) * (size - 1)) {
      rest = rest / 2;
    } else {
      rest = std::clamp(2 * rest, shortest, longest);
      together_from = end + rest;
    }
  }

  void serve(int64_t me, uint32_t seen) {
    while (true) {
      begin.wait(seen, spins_between);
      seen = begin.number();
      const int64_t size = seen % most_threads;
      if (me >= size) continue;
      job(argument, Team{me, size, this});
      meet(me, size);
    }
  }
};

inline void Team::wait() const {
  if (size > 1) pool->meet(me, size);
}

}  // namespace
