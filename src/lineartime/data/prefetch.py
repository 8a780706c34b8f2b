"""Prefetching: a thread prepares the next steps while the current one is computed."""

import queue
import threading
from typing import Any

from lineartime.data.batches import Batch
from lineartime.data.loaders import Loader

_AHEAD = 2  # steps; preparing more would only take memory
_PATIENCE = 5.0  # seconds to wait for a thread that may be waiting for a network
_Step = tuple[list[Batch], dict[str, Any]]  # batches, and the state of the loader after them


class _Worker:
    """A thread that takes steps from a loader until `stop`, or until the loader raises."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._free = threading.Semaphore(_AHEAD)
        self._done: queue.SimpleQueue[_Step | BaseException] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lineartime-data", daemon=True)
        self._thread.start()

    def get(self) -> _Step:
        result = self._done.get()
        if isinstance(result, BaseException):
            self._done.put(result)  # so that the next call raises it too
            raise result
        self._free.release()
        return result

    def stop(self, patience: float | None) -> bool:
        self._stopping = True
        self._free.release()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stopping:
                    return
                batches = self._loader.next_step()
                self._done.put((batches, self._loader.state()))
        except BaseException as error:  # raised in the thread that waits for the step
            self._done.put(error)


class PrefetchedLoader:
    """A loader that prepares up to two steps ahead in a thread; its state is that of the last step it returned."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._state = loader.state()
        self._worker: _Worker | None = None

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step. Raises any error that occurred while preparing them."""
        if self._worker is None:
            self._worker = _Worker(self._loader)
        batches, self._state = self._worker.get()
        return batches

    def state(self) -> dict[str, Any]:
        """The state of the loader after the last step returned."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Discard the prepared steps and continue from another state."""
        self._stop(None)
        self._loader.restore(state)
        self._state = state

    def close(self) -> None:
        """Stop the thread and close the loader."""
        if self._stop(_PATIENCE):  # otherwise the thread still uses it
            self._loader.close()

    def _stop(self, patience: float | None) -> bool:
        stopped = self._worker is None or self._worker.stop(patience)
        self._worker = None
        return stopped
