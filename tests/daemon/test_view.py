"""What people see of a running daemon: status, status --watch, check.

./run-tests daemon -k view
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bpf.harness import Driver
from tests.daemon.harness import PATIENCE_S, REPOSITORY, Daemon, Stage, moetuner, until

pytestmark = pytest.mark.root


@pytest.fixture
def infers(caller: Callable[..., Driver]) -> Driver:
    """A process that counts; it is inside a call between `inside process` and `return`."""
    return caller("--cpu-moe")


@pytest.fixture
def daemon(stage: Stage, library: Path, infers: Driver) -> Daemon:
    """It holds the floor for `infers`."""
    daemon = stage.daemon()
    daemon.await_watching(library)
    infers.ask("inside process")
    until(lambda: daemon.status()["floor"]["raised_hz"], "status says so", daemon.text)
    return daemon


def test_status_once(stage: Stage, daemon: Daemon, infers: Driver, library: Path) -> None:
    done = moetuner("status", "--root", stage.board.root)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    who = rf"pid {infers.pid} driver-\d+"
    assert re.fullmatch(rf"floor +1020 MHz \({who} inference\); 306 MHz was found", lines[0])
    assert re.fullmatch(
        r"GPU +1020 MHz of 1020 MHz to 1020 MHz, load 20 % \(17000000\.gpu\)", lines[1]
    )
    assert re.search(rf"^(processes +| +){who}: \d+ calls, infers; --cpu-moe$", done.stdout, re.M)
    assert re.search(rf"^(watching +| +){re.escape(str(library))} attached ", done.stdout, re.M)
    assert "\x1b" not in done.stdout


def test_status_json(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    done = moetuner("status", "--json", "--root", stage.board.root)
    told = json.loads(done.stdout)
    assert told["pid"] == daemon.pid
    assert told["floor"]["raised_hz"] == 1_020_000_000
    assert told["floor"]["found_hz"] == 306_000_000
    assert [p["pid"] for p in told["processes"] if p["infers"]] == [infers.pid]
    assert told["totals"]["inferring"] == 1


def test_status_after_the_daemon_was_killed(stage: Stage, daemon: Daemon) -> None:
    daemon.kill()
    done = moetuner("status", "--root", stage.board.root)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("moetuner: the moetuner daemon is not running (")
    stage.restore()
    assert not (stage.board.root / "run/moetuner/status.json").exists()


class Watch:
    """`status --watch`, and what it has written so far."""

    def __init__(self, root: Path, terminal: str | None) -> None:
        """In a pipe, or in a terminal of this TERM."""
        if terminal:
            self._reading, writing = pty.openpty()
        else:
            self._reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moetuner", "status", "--watch", "--root", str(root)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TERM": terminal or "xterm", "COLUMNS": "160"},
        )
        os.close(writing)
        self._written = b""

    def written(self) -> str:
        while select.select([self._reading], [], [], 0)[0]:
            try:
                data = os.read(self._reading, 65536)
            except OSError:  # a terminal whose other end is closed
                break
            if not data:
                break
            self._written += data
        return self._written.decode()

    def await_written(self, pattern: str, times: int = 1) -> None:
        until(lambda: len(re.findall(pattern, self.written())) >= times, pattern, self.written)

    def stop_reading(self) -> None:
        os.close(self._reading)

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Exit status and standard error."""
        if number is not None:
            self.process.send_signal(number)
        _, error = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, error


@pytest.fixture
def watch(stage: Stage) -> Iterator[Callable[..., Watch]]:
    watches: list[Watch] = []

    def start(terminal: str | None = None) -> Watch:
        watches.append(Watch(stage.board.root, terminal))
        return watches[-1]

    yield start
    for each in watches:
        each.process.kill()
        each.process.wait()


def test_watch_in_a_pipe(daemon: Daemon, infers: Driver, watch: Callable[..., Watch]) -> None:
    """Blocks of plain lines, as they change."""
    watching = watch()
    watching.await_written(r"(?m)^floor +1020 MHz \(", times=2)
    infers.ask("return")
    watching.await_written(r"(?m)^floor +not raised \(idle\)$")
    for _ in range(30):
        infers.ask("call process 10")
        time.sleep(0.05)
    watching.await_written(r"[1-9]\d*\.\d calls/s")
    assert "\x1b" not in watching.written()
    assert watching.end(signal.SIGINT) == (130, "")


def test_watch_in_a_terminal(daemon: Daemon, infers: Driver, watch: Callable[..., Watch]) -> None:
    watching = watch("xterm")
    watching.await_written(r"floor .*1020 MHz \(pid")
    infers.ask("return")
    watching.await_written(r"not raised \(idle\)")
    assert "Ctrl-C ends" in watching.written()
    code, error = watching.end(signal.SIGINT)
    assert (code, error) == (130, "")
    assert watching.written().endswith("\x1b[?25h")  # the cursor is back


def test_watch_in_a_terminal_without_a_cursor(daemon: Daemon, watch: Callable[..., Watch]) -> None:
    watching = watch("dumb")
    watching.await_written(r"(?m)^floor +1020 MHz \(", times=2)
    assert "\x1b" not in watching.written()


def test_watch_sees_the_daemon_go_and_come(
    stage: Stage, daemon: Daemon, watch: Callable[..., Watch]
) -> None:
    watching = watch()
    watching.await_written(r"(?m)^floor ")
    daemon.kill()
    watching.await_written(r"(?m)^daemon +the moetuner daemon is not running")
    before = watching.written().count("\nfloor ")
    stage.daemon()
    until(lambda: watching.written().count("\nfloor ") > before, "seen again")


def test_watch_ends_with_its_reader(daemon: Daemon, watch: Callable[..., Watch]) -> None:
    watching = watch()
    watching.await_written("floor ")
    watching.stop_reading()
    assert watching.end() == (0, "")


def test_check_beside_a_running_daemon(
    stage: Stage, daemon: Daemon, infers: Driver, library: Path
) -> None:
    """As root it loads the probe as the daemon did, and disturbs nothing."""
    done = moetuner("check", "--json", "--root", stage.board.root, "--config", daemon.config)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    findings = [(f["name"], f["state"], f["text"]) for f in told["findings"]]
    names = [name for name, _, _ in findings]
    assert ("daemon", "ok", f"runs as pid {daemon.pid} (moetuner {told['moetuner']})") in findings
    assert ("eBPF", "ok", "the probe compiles, loads and is accepted by the kernel") in findings
    llama = [text for name, _, text in findings if name == "llama.cpp" and str(library) in text]
    assert llama and str(infers.pid) in llama[0]
    (process,) = [text for _, _, text in findings if text.startswith(f"pid {infers.pid} ")]
    assert process.endswith(" counts: --cpu-moe")
    assert names[0] == "configuration"
    assert done.returncode == (0 if told["ready"] else 1)
    assert daemon.floors() == [line for line in daemon.floors() if "1020" in line]
