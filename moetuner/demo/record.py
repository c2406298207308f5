"""What happened when: calls, changes of min_freq and journal lines on one clock.

All times are seconds of the monotonic clock. Where each comes from:
calls from the kernel's uprobe events (stamped by the kernel), min_freq and journal
lines from inotify (stamped when this process wakes up, so some 0.1 ms late).
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from moetuner.demo.board import Board
from moetuner.demo.witness import Call
from moetuner.demo.writes import Writes
from moetuner.inotify import IN_CLOSE_WRITE, IN_MODIFY

MHZ = 1_000_000


@dataclass(frozen=True)
class Change:
    """One change of min_freq, in Hz."""

    at: float
    before: int
    after: int

    @property
    def is_raise(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True)
class JournalLine:
    at: float
    text: str


@dataclass(frozen=True)
class Window:
    """Everything between two moments, each kind in order of time."""

    calls: tuple[Call, ...]
    changes: tuple[Change, ...]
    journal: tuple[JournalLine, ...]

    @property
    def raises(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_raise)

    @property
    def falls(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if not change.is_raise)


class Recorder:
    """Records from start to stop, in a thread of its own; read it with `since`."""

    def __init__(self, board: Board, journal: Path) -> None:
        self._board = board
        self._journal = journal
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._changes: list[Change] = []
        self._lines: list[JournalLine] = []
        self._floor = board.floor()
        self._writes = Writes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Raises SystemRefused if one of the two files cannot be watched."""
        self._journal.touch()
        self._writes.watch(self._board.min_freq, IN_CLOSE_WRITE)
        self._writes.watch(self._journal, IN_MODIFY)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._writes.close()

    def heard(self, call: Call) -> None:
        """For the Witness: one call into the library."""
        with self._lock:
            self._calls.append(call)

    def since(self, begin: float) -> Window:
        with self._lock:
            return Window(
                tuple(call for call in self._calls if call.at >= begin),
                tuple(change for change in self._changes if change.at >= begin),
                tuple(line for line in self._lines if line.at >= begin),
            )

    def wait_until_low(self, timeout_s: float) -> bool:
        """Waits until the floor is at the board's lowest; False after `timeout_s`."""
        lowest = self._board.lowest()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._board.floor() == lowest:
                return True
            time.sleep(0.02)
        return False

    def wait_for_line(self, part: str, timeout_s: float) -> bool:
        """Waits for a journal line that contains `part`; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(part in line.text for line in self.since(0).journal):
                return True
            time.sleep(0.05)
        return False

    def _run(self) -> None:
        with self._journal.open("rb") as journal:
            rest = b""
            while not self._ended.is_set():
                written = self._writes.wait(0.2)
                now = time.monotonic()
                if self._board.min_freq in written:
                    self._note_floor(now)
                rest += journal.read()
                *lines, rest = rest.split(b"\n")
                with self._lock:
                    self._lines += [
                        JournalLine(now, line.decode("utf-8", "replace")) for line in lines
                    ]

    def _note_floor(self, now: float) -> None:
        floor = self._board.floor()
        if floor != self._floor:
            with self._lock:
                self._changes.append(Change(now, self._floor, floor))
            self._floor = floor


@dataclass(frozen=True)
class Entry:
    """One line of the time line: when, which kind, what."""

    at: float
    kind: str
    text: str


def time_line(window: Window) -> list[Entry]:
    """The window as lines, in order: only the first call after a pause and the last of all."""
    entries = [
        Entry(call.at, "call", f"first {call.function} after a pause (thread {call.thread})")
        for call in starts(window.calls)
    ]
    if window.calls:
        last = window.calls[-1]
        entries.append(Entry(last.at, "call", f"{last.function}, the last of {len(window.calls)}"))
    for change in window.changes:
        text = f"{change.before // MHZ} → {change.after // MHZ} MHz"
        if (delay := delay_of(change, window.calls)) is not None:
            which = "first" if change.is_raise else "last"
            unit = f"{delay * 1000:.2f} ms" if change.is_raise else f"{delay:.3f} s"
            text += f", {unit} after the {which} call"
        entries.append(Entry(change.at, "min_freq", text))
    entries += [Entry(line.at, "journal", line.text) for line in window.journal]
    return sorted(entries, key=lambda entry: entry.at)


def others(journal: tuple[JournalLine, ...], ours: frozenset[int]) -> list[str]:
    """Journal lines about further processes on this machine that count, so hold the floor up."""
    found = re.compile(r"pid (\d+) (?!.*does not count).*keeps experts on the CPU")
    matches = ((found.match(line.text), line.text) for line in journal)
    return [text for match, text in matches if match and int(match[1]) not in ours]


PAUSE_S = 0.9  # just under `hold`: a call after so long is the first of a new activity


def starts(calls: tuple[Call, ...]) -> list[Call]:
    """The calls that no other call came before within PAUSE_S."""
    found = []
    previous = float("-inf")
    for call in calls:
        if call.at - previous >= PAUSE_S:
            found.append(call)
        previous = call.at
    return found


def delay_of(change: Change, calls: tuple[Call, ...]) -> float | None:
    """Seconds from the call that caused the change: for a raise the latest first call
    before it, for a fall the last call before it. None if no call was heard before.
    """
    causes = starts(calls) if change.is_raise else calls
    before = [call.at for call in causes if call.at <= change.at]
    return change.at - before[-1] if before else None
