"""The whole demonstration, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetuner.demo import __main__ as demo_main
from moetuner.demo.llamacpp import LlamaBuild
from moetuner.errors import MissingRequirement

pytestmark = [pytest.mark.slow, pytest.mark.root]
ROOT = Path(demo_main.__file__).parents[2]


class Demo:
    """A running demonstration; `told` is what it prints for people."""

    def __init__(self, build: LlamaBuild, log: Path, *arguments: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "moetuner.demo", "--llama", str(build.build), *arguments]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if "--json" in arguments else stderr,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    @property
    def told(self) -> str:
        return self._log.read_text()

    def line(self, label: str) -> str:
        """The rest of the line that begins with `label`."""
        lines = [line.strip() for line in self.told.splitlines()]
        return next(line for line in lines if line.startswith(label))[len(label) :].strip()

    def await_told(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.told:
            assert self.process.poll() is None and time.monotonic() < deadline, self.told
            time.sleep(0.05)

    def session(self) -> Path:
        """The directory with the board, the logs and all that must be gone afterwards."""
        found = re.search(r"^  (\S*/moetuner-demo-[^/]+)/board ", self.told, re.MULTILINE)
        assert found, self.told
        return Path(found[1])


def _nothing_left(session: Path) -> None:
    assert not session.exists()
    assert "moetuner-tracefs" not in Path("/proc/self/mounts").read_text()
    assert _commands_naming(str(session)) == []


def test_every_check_holds_and_nothing_is_left(llama: LlamaBuild, tmp_path: Path) -> None:
    demo = Demo(llama, tmp_path / "told", "--json")
    output, _ = demo.process.communicate(timeout=300)
    summary = json.loads(output)
    assert [check["text"] for check in summary["checks"] if not check["held"]] == []
    assert len(summary["checks"]) >= 20
    assert demo.process.returncode == 0
    _nothing_left(demo.session())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(
    llama: LlamaBuild, tmp_path: Path, number: signal.Signals
) -> None:
    demo = Demo(llama, tmp_path / "told")
    demo.await_told("==> Request 1")
    session = demo.session()
    assert _commands_naming(str(session))  # something is there to be cleaned up
    demo.process.send_signal(number)
    assert demo.process.wait(60) == 130
    assert "Interrupted" in demo.told
    _nothing_left(session)


def test_keep_leaves_it_running_and_says_how_to_stop_it(llama: LlamaBuild, tmp_path: Path) -> None:
    demo = Demo(llama, tmp_path / "told", "--keep")
    status = demo.process.wait(300)
    try:
        assert status == 0, demo.told
        for label in ("status:", "ask:"):
            shown = subprocess.run(
                ["sh", "-c", demo.line(label)], capture_output=True, text=True, cwd=ROOT
            )
            assert shown.returncode == 0, shown.stderr
    finally:
        subprocess.run(["sh", "-c", demo.line("stop:")], check=True)
    deadline = time.monotonic() + 30
    while _commands_naming(str(demo.session())) and time.monotonic() < deadline:
        time.sleep(0.1)
    _nothing_left(demo.session())


def _commands_naming(text: str) -> list[str]:
    """Command lines of running processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if text in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    assert demo_main.main([]) == MissingRequirement.exit_code
    assert "needs root" in capsys.readouterr().err
