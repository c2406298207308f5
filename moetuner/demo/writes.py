"""Sleeps until one of several files is written."""

from __future__ import annotations

import select
from pathlib import Path

from moetuner.errors import SystemRefused, reason
from moetuner.inotify import IN_CLOSE_WRITE, Inotify


class Writes:
    """Writes to the watched files, from any process. Not for use from two threads at once."""

    def __init__(self) -> None:
        self._inotify = Inotify()
        self._paths: dict[int, Path] = {}

    def watch(self, path: Path, mask: int = IN_CLOSE_WRITE) -> None:
        """SystemRefused if the file is not there or cannot be watched."""
        try:
            self._paths[self._inotify.add(str(path), mask)] = path
        except OSError as error:
            raise SystemRefused(f"cannot watch {path}: {reason(error)}") from error

    def wait(self, timeout_s: float | None = None) -> list[Path]:
        """The files written since the last call, each once; empty after the timeout."""
        if not select.select([self._inotify], [], [], timeout_s)[0]:
            return []
        return list({self._paths[number]: None for number, _ in self._inotify.read()})

    def close(self) -> None:
        self._inotify.close()
