"""The real Watcher, driven as the daemon drives it, and processes that obey a test."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from moetuner.config import WatchConfig
from moetuner.log import INFO
from moetuner.watch import layout
from moetuner.watch.callers import Look
from moetuner.watch.libraries import Library, identify
from moetuner.watch.processes import Process
from moetuner.watch.watcher import Report, Watcher

# Nothing here takes a second; a machine that is busy with other things may need many.
PATIENCE_S = 60.0
HOLD_S = 1.0


def descriptors() -> list[str]:
    """What this process has open, by name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


class Rig:
    """A watcher and everything that it told.

    calls: (pid, name) of each transition reported; ends: pids reported as ended; lines:
    the log; judged: the processes that it asked about. `verdict` answers for them.
    """

    def __init__(self, returns: str = "auto", libraries: Sequence[str | Path] = ()) -> None:
        self.calls: list[tuple[int, str]] = []
        self.ends: list[int] = []
        self.lines: list[str] = []
        self.judged: list[Process] = []
        self.changes = 0
        self.verdict: Callable[[Process], tuple[bool, str]] = lambda process: (True, "a test")
        self.selector = selectors.DefaultSelector()
        report = Report(self._judge, self._call, self.ends.append, self._change)
        self.config = WatchConfig(tuple(map(str, libraries)), 300.0, returns)
        self.watcher = Watcher(self.config, report, self.selector, time.monotonic, self._log)
        self.watcher.set_hold(HOLD_S)
        self.watcher.tick()

    def _judge(self, process: Process) -> tuple[bool, str]:
        self.judged.append(process)
        return self.verdict(process)

    def _call(self, pid: int, name: str, at: float) -> None:
        assert at <= time.monotonic()
        self.calls.append((pid, name))

    def _change(self) -> None:
        self.changes += 1

    def _log(self, message: str, priority: int = INFO) -> None:
        self.lines.append(message)

    # -- time -------------------------------------------------------------------------

    def turn(self, timeout: float = 0.0) -> None:
        """One round of the daemon's loop."""
        for key, _ in self.selector.select(timeout):
            key.data()
        if time.monotonic() >= self.watcher.deadline:
            self.watcher.tick()

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"never: {what}\n" + "\n".join(self.lines[-20:])
            self.turn(0.02)

    def settle(self) -> None:
        """Everything that has happened so far is told, and no file is being examined."""
        self.until(self._idle, "quiet")

    def _idle(self) -> bool:
        states = [library.state for library in self.watcher.libraries.known.values()]
        return "examining" not in states and not self.selector.select(0) and self._rested()

    def _rested(self) -> bool:
        # A rest after mappings hides their descriptor; it ends with the next tick.
        return self.watcher.deadline > time.monotonic() + 1

    def rescan(self) -> None:
        """What is due every `watch.rescan`."""
        self.watcher._discovery.scan()

    # -- files ------------------------------------------------------------------------

    def library(self, path: Path | str | bytes) -> Library | None:
        """What is known of the file that `path` names now."""
        fd = os.open(path, os.O_RDONLY)
        try:
            return self.watcher.libraries.known.get(identify(fd, os.fstat(fd)))
        finally:
            os.close(fd)

    def state(self, path: Path | str | bytes) -> str:
        library = self.library(path)
        return library.state if library else "unknown"

    def attached(self, path: Path | str | bytes) -> Library:
        """Waits until the file is watched, without any help."""
        self.until(lambda: self.state(path) in ("attached", "failed"), f"{path!r} attached")
        library = self.library(path)
        assert library and library.state == "attached", library
        return library

    # -- processes --------------------------------------------------------------------

    def count(self, pid: int) -> int:
        """Entries that the kernel counted."""
        return self.watcher.callers.calls(pid)

    def told(self, pid: int) -> int:
        """Transitions of a process that were reported."""
        self.settle()
        return sum(1 for called, _ in self.calls if called == pid)

    def look(self, pid: int) -> Look:
        """A sample as the daemon takes one after a long silence."""
        return self.watcher.look(pid, float("inf"))

    def in_flight(self, pid: int) -> bool:
        return self.look(pid).in_flight is not None

    def inside(self, pid: int) -> list[int]:
        """Threads of the process that the kernel has as inside a call."""
        state = layout.ThreadState()
        threads = self.watcher.program.threads
        return [
            key & 0xFFFFFFFF
            for key in list(threads.keys())
            if key >> 32 == pid and threads.lookup(key, state) and any(state.sp)
        ]

    def close(self) -> None:
        self.watcher.close()
        self.selector.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Driver:
    """A running driver.cpp (or anything that answers lines); killed at the end."""

    def __init__(self, command: Iterable[str | bytes | Path]) -> None:
        self.process = subprocess.Popen(
            [os.fsencode(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self.process.pid
        assert self._line() == "ready"

    def say(self, line: str | bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write((line if isinstance(line, bytes) else line.encode()) + b"\n")

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().decode("utf-8", "replace").rstrip("\n")

    def answer(self) -> str:
        """What a command that says nothing at first says in the end."""
        return self._line()

    def ask(self, line: str | bytes) -> str:
        """Sends a line; its answer. Empty if the process ended instead."""
        self.say(line)
        return self._line()

    def load(self, path: Path | str | bytes) -> None:
        answer = self.ask(b"load " + os.fsencode(path))
        assert answer == "loaded", answer

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Its status after the signal; it is reaped, so the pid is free."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
