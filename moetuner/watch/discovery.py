"""Finds llama.cpp's files: those in use now, those that get mapped, those configured.

New files are noticed when they are mapped (mappings.py). A scan of all processes, at the
start, every `rescan_s` and after lost records, is the safety net; it also finds out who
uses what, so that files nobody maps any more can be let go.
"""

from __future__ import annotations

import glob
import os
import selectors
from collections.abc import Callable

from moetuner.errors import MissingRequirement
from moetuner.log import WARNING, Log
from moetuner.watch.libraries import Identity, Libraries
from moetuner.watch.mappings import LONG_REST_S, REST_S, Mapping, Mappings
from moetuner.watch.processes import ProcFs


class Discovery:
    """Owner of all fields: the daemon's only thread. `clock`: CLOCK_MONOTONIC seconds."""

    def __init__(
        self,
        libraries: Libraries,
        mappings: Mappings,
        proc: ProcFs,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        self._libraries = libraries
        self._mappings = mappings
        self._proc = proc
        self._selector = selector
        self._clock = clock
        self._log = log
        self._configured: tuple[str, ...] = ()
        self._rescan_s = 0.0
        self._lost = 0
        self._rest_s = REST_S
        self._resting_until: float | None = None
        self._next_scan = 0.0
        self._listen()

    def _listen(self) -> None:
        # One descriptor for all cpus' buffers, so that a rest is one call.
        self._epoll = selectors.EpollSelector()
        for fd in self._mappings.filenos():
            self._epoll.register(fd, selectors.EVENT_READ)
        if self._resting_until is None:
            self._selector.register(self._epoll.fileno(), selectors.EVENT_READ, self._mapped)

    def _deaf(self) -> None:
        if self._resting_until is None:
            self._selector.unregister(self._epoll.fileno())
        self._epoll.close()

    def cpus_changed(self) -> None:
        """A processor went on- or offline: listens to all anew, and scans at the next tick."""
        try:
            self._mappings.reopen()
        except MissingRequirement as error:  # it changed again: the next scan tries once more
            self._log(f"{error}; new files are found every {self._rescan_s:g} s only", WARNING)
        else:
            self._deaf()
            self._listen()
        self._next_scan = 0.0

    def configure(self, paths: tuple[str, ...], rescan_s: float) -> None:
        """Paths (globs) to watch in addition; seconds between scans. Scans at the next tick."""
        self._configured, self._rescan_s = paths, rescan_s
        self._next_scan = 0.0
        for path in paths:
            if not glob.glob(path):
                self._log(f"watch.libraries: there is no {path} yet", WARNING)

    @property
    def deadline(self) -> float:
        """When tick has something to do."""
        if self._resting_until is None:
            return self._next_scan
        return min(self._resting_until, self._next_scan)

    def tick(self) -> None:
        """What is due: the end of a rest, a scan."""
        now = self._clock()
        if self._resting_until is not None and now >= self._resting_until:
            self._resting_until = None
            self._selector.register(self._epoll.fileno(), selectors.EVENT_READ, self._mapped)
        if self._resting_until is None and self._mappings.pending:
            # What came during a rest; on a quiet machine nothing else would wake us for it.
            self._mapped()
        if now >= self._next_scan:
            self._next_scan = now + self._rescan_s
            self.scan()

    def _mapped(self) -> None:
        new = False
        for mapping in self._mappings.read():
            new = True
            self._offer(mapping)
        if self._mappings.lost > self._lost:
            self._lost = self._mappings.lost
            self._next_scan = 0.0
        self._selector.unregister(self._epoll.fileno())
        self._rest_s = REST_S if new else min(2 * self._rest_s, LONG_REST_S)
        self._resting_until = self._clock() + self._rest_s

    def _offer(self, mapping: Mapping) -> None:
        pid, inode = mapping.pid, mapping.identity[2]
        opener = self._proc.mapped_file(pid, mapping.start, mapping.start + mapping.length)
        try:
            self._libraries.offer(opener, os.readlink(opener), pid)
            return
        except OSError:
            pass
        # Split by mprotect since: look it up by its inode.
        for current in self._proc.executable_mappings(pid):
            if current.inode == inode:
                opener = self._proc.mapped_file(pid, current.start, current.end)
                self._libraries.offer(opener, current.path, pid)
                return
        # The process has ended already; its file may still be where it saw it.
        try:
            status = os.stat(mapping.path)
        except (OSError, ValueError):
            return
        device = (os.major(status.st_dev), os.minor(status.st_dev))
        if (*device, status.st_ino) == mapping.identity[:3]:
            self._libraries.offer(mapping.path, mapping.path)

    def scan(self) -> None:
        """Looks at every process and every configured path."""
        if self._mappings.stale:
            self.cpus_changed()
            self._next_scan = self._clock() + self._rescan_s
        for pattern in self._configured:
            for path in glob.glob(pattern):
                self._libraries.offer(path, path)
        mapped: dict[Identity, set[int]] = {}
        identities: dict[tuple[tuple[int, int], int], Identity | None] = {}
        for pid in self._proc.pids():
            for mapping in self._proc.executable_mappings(pid):
                key = (mapping.device, mapping.inode)
                if key not in identities:
                    opener = self._proc.mapped_file(pid, mapping.start, mapping.end)
                    identity = self._libraries.offer(opener, mapping.path, pid)
                    if identity is None and not os.path.lexists(opener):
                        continue  # ended meanwhile: the next process's mapping answers
                    identities[key] = identity
                identity = identities[key]
                if identity is not None:
                    mapped.setdefault(identity, set()).add(pid)
        if self._libraries.retire(mapped):
            self._mappings.forget()

    def close(self) -> None:
        self._deaf()
        self._mappings.close()
