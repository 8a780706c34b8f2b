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

  // Wait until the number is not `seen`.
  void wait(uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (number() != seen) return;
      pause_a_moment();
    }
    ++sleepers;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return value.load() != seen; });
    --sleepers;
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
  // Run function(team) in `size` threads, or in this one alone if others compute here, or if that has been faster lately, as
  // beside other programs. `work` is what takes time, in any unit.
  template <class F>
  static void run(int64_t size, double work, const F& function) {
    static std::mutex one_at_a_time;
    static Pool* pool = nullptr;
    const std::unique_lock<std::mutex> lock(one_at_a_time, std::try_to_lock);
    if (size <= 1 || !lock.owns_lock()) return function(Team{0, 1, nullptr});
    if (pool == nullptr || pool->process != getpid()) pool = new Pool;  // a fork has none of the threads
    pool->run_by(size, work, [](const void* f, const Team& team) { (*static_cast<const F*>(f))(team); }, &function);
  }

  // Wait until all threads of the team are here.
  void meet(int64_t me, int64_t size) {
    const uint32_t seen = meeting.number();
    if (arrived.fetch_add(1) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      meeting.ring(seen + 1);
      return;
    }
    meeting.wait(seen, spins_at_work);
  }

 private:
  typedef void (*Job)(const void*, const Team&);

  // A look takes 10 to 50 ns. To wake a thread takes longer on a virtual machine than Python between two tokens.
  static constexpr int spins_at_work = 4000, spins_between = 6000, most_threads = 256, runs_of_a_try = 4;
  const pid_t process = getpid();
  Bell begin, meeting;  // `begin` counts the runs, and says the size of the team in its last digits
  std::atomic<int64_t> arrived{0};
  int64_t threads = 1;
  Job job = nullptr;
  const void* argument = nullptr;
  // The time for a unit of work, averaged over the last runs, alone and together; what is chosen; how often the other is tried.
  double cost[2] = {0, 0};
  int chosen = 1, left_to_try = 0;
  Clock::duration patience{0};
  Clock::time_point next_try{};

  void run_by(int64_t size, double work, Job todo, const void* of) {
    const auto start = Clock::now();
    if (left_to_try == 0 && start >= next_try) left_to_try = runs_of_a_try;
    const bool tries = left_to_try > 0;
    const int how = tries ? 1 - chosen : chosen;
    if (how == 0) {
      todo(of, Team{0, 1, nullptr});
    } else {
      size = std::min<int64_t>(size, most_threads - 1);
      for (; threads < size; ++threads) std::thread(&Pool::serve, this, threads, begin.number()).detach();
      job = todo, argument = of;
      begin.ring((begin.number() / most_threads + 1) * most_threads + uint32_t(size));
      todo(of, Team{0, size, this});
      meet(0, size);
    }
    const auto end = Clock::now();
    const double found = std::chrono::duration<double>(end - start).count() / work;
    cost[how] += (found - cost[how]) / (cost[how] == 0 ? 1 : tries ? 2 : 8);
    if (tries && --left_to_try > 0) return;
    const bool changes = cost[1 - chosen] != 0 && cost[1 - chosen] < cost[chosen];
    if (!tries && !changes) return;
    const Clock::duration shortest = std::chrono::milliseconds(16), longest = std::chrono::milliseconds(512);
    if (changes) chosen = 1 - chosen;
    patience = changes ? shortest : std::min(std::max(2 * patience, shortest), longest);
    next_try = end + patience;
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
