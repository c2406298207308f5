"""Runs inspectors (inspector.py), a few at a time, without waiting for any of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from moetuner.errors import reason
from moetuner.watch import helper

AT_ONCE = 2  # each needs 30 MB and up, and a processor for half a second
_ANSWER_LIMIT = 1 << 20  # bytes; an answer has about 1 KB


@dataclass
class _Inspection:
    key: Hashable
    fd: int  # the file's
    done: Callable[[bytes], None]
    process: subprocess.Popen[bytes] | None = None
    data: bytearray = field(default_factory=bytearray)


class Inspections:
    """Owner of all fields: the daemon's only thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: deque[_Inspection] = deque()
        self._running: dict[Hashable, _Inspection] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running or any(w.key == key for w in self._waiting)

    def start(self, key: Hashable, fd: int, done: Callable[[bytes], None]) -> None:
        """Examines the open file `fd` and gives the answer, unchecked, to `done`; one that
        runs for `key` is given up. `fd` stays open until then."""
        self.cancel(key)
        self._waiting.append(_Inspection(key, fd, done))
        self._next()

    def cancel(self, key: Hashable) -> None:
        """Gives up what runs or waits for `key`: its `done` is never called."""
        self._waiting = deque(w for w in self._waiting if w.key != key)
        inspection = self._running.pop(key, None)
        if inspection is not None:
            self._end(inspection)
            self._next()

    def _next(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            inspection = self._waiting.popleft()
            try:
                process = subprocess.Popen(
                    helper.command("moetuner.watch.inspector", str(inspection.fd)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[inspection.fd],
                    **helper.surroundings(),
                )
            except OSError as error:
                problem = {"error": f"the inspector does not start: {reason(error)}"}
                inspection.done(json.dumps(problem).encode())
                continue
            assert process.stdout is not None
            inspection.process = process
            self._running[inspection.key] = inspection
            self._selector.register(
                process.stdout, selectors.EVENT_READ, lambda i=inspection: self._readable(i)
            )

    def _readable(self, inspection: _Inspection) -> None:
        if self._running.get(inspection.key) is not inspection:
            return  # cancelled in this same round
        assert inspection.process is not None and inspection.process.stdout is not None
        data = os.read(inspection.process.stdout.fileno(), 65536)
        inspection.data += data
        if data and len(inspection.data) <= _ANSWER_LIMIT:
            return
        del self._running[inspection.key]
        self._end(inspection)
        inspection.done(bytes(inspection.data))
        self._next()

    def _end(self, inspection: _Inspection) -> None:
        process = inspection.process
        assert process is not None and process.stdout is not None
        self._selector.unregister(process.stdout)
        process.stdout.close()
        with contextlib.suppress(PermissionError):  # it is nobody's, and we have no CAP_KILL
            process.kill()  # it has said everything, or too much
        process.wait()

    def close(self) -> None:
        self._waiting.clear()
        for inspection in self._running.values():
            self._end(inspection)
        self._running.clear()
