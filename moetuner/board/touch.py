"""Somebody wrote to the node's min_freq or max_freq, whatever the value: as a descriptor.

inotify sees writes to sysfs attributes. A value that is written again as it was, or
written over and put back, cannot be told by reading; this tells it. Where inotify does
not work, the look once a second at a raised floor compares values.
"""

from __future__ import annotations

import contextlib

from moetuner.board.devfreq import CLASS
from moetuner.board.sysroot import SysRoot
from moetuner.inotify import IN_MODIFY, Inotify


class Touch:
    """Owner: the daemon's only thread."""

    def __init__(self, root: SysRoot) -> None:
        self._root = root
        self._inotify = Inotify()
        self._node: str | None = None
        self._min: int | None = None
        self._max: int | None = None

    def fileno(self) -> int:
        return self._inotify.fileno()

    def watch(self, node: str | None) -> None:
        """From now on this node's files (None: none). Nothing if it is watched already."""
        if node == self._node:
            return
        for watch in (self._min, self._max):
            if watch is not None:
                self._inotify.remove(watch)
        self._node, self._min, self._max = node, None, None
        if node is not None:
            with contextlib.suppress(OSError):
                directory = self._root.path(f"{CLASS}/{node}")
                self._min = self._inotify.add(str(directory / "min_freq"), IN_MODIFY)
                self._max = self._inotify.add(str(directory / "max_freq"), IN_MODIFY)

    def drain(self) -> bool | None:
        """None: nothing was written since the last drain; else whether min_freq was."""
        watches = {watch for watch, mask in self._inotify.read() if mask & IN_MODIFY}
        watches &= {self._min, self._max}
        return (self._min in watches) if watches else None

    def close(self) -> None:
        self._inotify.close()
