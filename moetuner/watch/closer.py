"""Closes probes in a thread of its own.

The kernel waits for grace periods at each (0.1 s measured, one after the other whatever
is tried: more threads only queue up inside it), and llama.cpp's library has eleven: the
daemon's loop, which raises and lowers the floor, must not wait for that.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections.abc import Callable, Sequence

_Work = tuple[tuple[int, ...], Callable[[], None]]


class Closer:
    """The worker owns the descriptors it is given; everything else the loop's thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None  # most daemons never detach anything
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.register(self._event, selectors.EVENT_READ, self._finished)

    def close_all(self, fds: Sequence[int], then: Callable[[], None]) -> None:
        """Closes `fds` in their order; `then` runs in the loop's thread when all are closed."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name="detach")
            self._worker.start()
        self._work.put((tuple(fds), then))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            fds, then = work
            for fd in fds:
                os.close(fd)
            self._done.put(then)
            os.eventfd_write(self._event, 1)

    def _finished(self) -> None:
        os.eventfd_read(self._event)
        while not self._done.empty():
            self._done.get()()

    def close(self) -> None:
        """Waits until everything is closed; no `then` runs any more."""
        if self._worker is not None:
            self._work.put(None)
            self._worker.join()
        self._selector.unregister(self._event)
        os.close(self._event)
