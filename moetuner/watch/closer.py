"""Closes probes in threads of their own.

The kernel waits for grace periods at each (0.1 s measured, one after the other whatever
is tried), and llama.cpp's library has eleven: the daemon's loop, which raises and lowers
the floor, must not wait for that.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections.abc import Callable, Sequence


class Closer:
    """Owner of all fields: the daemon's only other thread is inside `_run`."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._threads: set[threading.Thread] = set()
        self._done: queue.SimpleQueue[tuple[threading.Thread, Callable[[], None]]]
        self._done = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.register(self._event, selectors.EVENT_READ, self._finished)

    def close_all(self, fds: Sequence[int], then: Callable[[], None]) -> None:
        """Closes `fds` in their order; `then` runs in the loop's thread when all are closed."""
        thread = threading.Thread(target=self._run, args=(tuple(fds), then), name="detach")
        self._threads.add(thread)
        thread.start()

    def _run(self, fds: tuple[int, ...], then: Callable[[], None]) -> None:
        for fd in fds:
            os.close(fd)
        self._done.put((threading.current_thread(), then))
        os.eventfd_write(self._event, 1)

    def _finished(self) -> None:
        os.eventfd_read(self._event)
        while not self._done.empty():
            thread, then = self._done.get()
            thread.join()
            self._threads.discard(thread)
            then()

    def close(self) -> None:
        """Waits until everything is closed; no `then` runs any more."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._selector.unregister(self._event)
        os.close(self._event)
