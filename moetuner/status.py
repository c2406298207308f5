"""status.json: what the daemon tells others about itself, and how people see it.

Written by atomic replace, when something changed and at most once a second (every two
seconds while only counters run on). Its keys
are a contract (docs/status.md): they are added to, not renamed; `version` counts
incompatible changes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import moetuner
from moetuner import activity, floor
from moetuner.board.instance import alive
from moetuner.board.sysroot import Missing, SysRoot
from moetuner.config import Config
from moetuner.errors import MoetunerError, NotSo, SystemRefused

if TYPE_CHECKING:  # `moetuner restore` needs no eBPF
    from moetuner.watch.watcher import Watcher

PATH = "/run/moetuner/status.json"
VERSION = 1
LIMIT = 4 << 20  # bytes; 1,000 processes make 0.3 MB
EVERY_S = 1.0
COUNTERS_EVERY_S = 2.0  # writing it is a third of what the daemon does while tokens flow
SLACK_S = 0.05  # a wake-up that comes for something else this early writes it too
# The most recent callers that are listed; a machine with more has its counts in `totals`.
LISTED = 200

Snapshot = dict[str, Any]


class Writer:
    """When to write, and writing. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, root: SysRoot) -> None:
        self._root = root
        self._every_s: float | None = EVERY_S  # None: nothing changed
        self._written_at = float("-inf")
        self._failing = False

    def touch(self) -> None:
        """Something that status shows has changed."""
        self._every_s = EVERY_S

    def count(self) -> None:
        """Only counters have."""
        self._every_s = self._every_s or COUNTERS_EVERY_S

    @property
    def deadline(self) -> float | None:
        return None if self._every_s is None else self._written_at + self._every_s

    def due(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline - SLACK_S

    def write(self, snapshot: Snapshot, now: float) -> str | None:
        """Why it could not be written, the first time that happens; the daemon goes on without,
        and tries again a second later."""
        self._every_s, self._written_at = None, now
        snapshot["updated"] = round(time.time(), 3)
        try:
            self._root.replace(PATH, json.dumps(snapshot) + "\n")
        except SystemRefused as error:
            first, self._failing, self._every_s = not self._failing, True, EVERY_S
            return error.message if first else None
        self._failing = False
        return None

    def remove(self) -> None:
        try:
            self._root.remove(PATH)
        except SystemRefused:
            self._failing = True  # a full or read-only /run; its age tells that it is old


def read(root: SysRoot) -> Snapshot:
    """The running daemon's status. NotSo when none runs; MoetunerError when it is damaged."""
    not_running = NotSo(
        "the moetuner daemon is not running", "systemctl status moetuner; journalctl -u moetuner"
    )
    try:
        text = root.read_state(PATH, LIMIT)
    except Missing:
        raise not_running from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise MoetunerError(f"{root.path(PATH)} is damaged", "restart moetuner") from None
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise MoetunerError(
            f"{root.path(PATH)} was written by another version of moetuner", "restart moetuner"
        )
    pid = value.get("pid")
    if type(pid) is not int or pid <= 0 or not alive(pid):
        raise not_running  # it was killed, and left this behind
    return value


def snapshot(
    *,
    config: Config,
    config_error: str | None,
    node: str | None,
    state: floor.State,
    active: activity.Activity,
    watcher: Watcher,
    started: float,
    pid: int,
    now: float,
) -> Snapshot:
    """Everything that status.json holds but `updated`. Frequencies in Hz, times in seconds."""
    infers = {a.pid for a in active.active}
    callers = sorted(watcher.callers.known.values(), key=lambda c: (c.pid not in infers, -c.pid))
    return {
        "version": VERSION,
        "moetuner": moetuner.__version__,
        "pid": pid,
        "started": round(started, 3),
        "node": node,
        "floor": {
            "raised_hz": floor.raised_hz(state),
            "found_hz": state.held.found_hz if state.held else None,
            "who": active.who or None,
            "obstacle": floor.obstacle(state, now) if active.who else None,
            "hold_s": active.hold,
        },
        "processes": [
            {
                "pid": caller.pid,
                "name": caller.name,
                "exe": caller.exe,
                "counts": caller.counts,
                "reason": caller.reason,
                "infers": caller.pid in infers,
                "calls": watcher.callers.calls(caller.pid),
            }
            for caller in callers[:LISTED]
        ],
        "totals": {
            "processes": len(callers),
            "counting": sum(caller.counts for caller in callers),
            "inferring": len(infers),
        },
        "libraries": [
            {
                "path": library.path,
                "state": library.state,
                "functions": list(library.functions),
                "returns": library.returns or None,
                "why": library.why or None,
                "processes": len(library.pids),
            }
            for library in watcher.libraries.known.values()
        ],
        "probe": {
            "headers": watcher.program.headers,
            "mappings_lost": watcher.mappings_lost,
            **asdict(watcher.counters()),
        },
        "configuration": {"source": config.source, "error": config_error},
    }
