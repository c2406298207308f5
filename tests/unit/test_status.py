"""status.json and how people see it.

./run-tests unit -k status
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetuner import cli, status, statusview
from moetuner.board.sysroot import SysRoot
from moetuner.board.telemetry import Sample
from moetuner.errors import MoetunerError, NotSo
from tests.support.boards import MHZ, ORIN_NANO_JP6, THOR
from tests.support.public import Public

IDLE: status.Snapshot = {
    "version": 1,
    "moetuner": "0.1.0",
    "pid": os.getpid(),
    "started": 1000.0,
    "updated": 2000.0,
    "node": "17000000.gpu",
    "floor": {
        "raised_hz": None,
        "found_hz": None,
        "who": None,
        "obstacle": None,
        "hold_s": 1.0,
    },
    "processes": [],
    "totals": {"processes": 0, "counting": 0, "inferring": 0},
    "libraries": [],
    "probe": {
        "headers": "x", "mappings_lost": 0, "wakeups": 3, "lost": 0, "unmatched": 1, "unwound": 2,
    },
    "configuration": {"source": "built-in defaults", "error": None},
}  # fmt: skip
SERVER = {
    "pid": 2213, "name": "llama-server", "exe": "/opt/llama-server", "counts": True,
    "reason": "--cpu-moe", "infers": True, "calls": 120,
}  # fmt: skip


def snapshot(**changes: Any) -> status.Snapshot:
    return {**copy.deepcopy(IDLE), **changes}


@pytest.fixture
def root(tmp_path: Path) -> SysRoot:
    ORIN_NANO_JP6.write(tmp_path)
    return SysRoot(tmp_path)


def put(root: SysRoot, value: status.Snapshot) -> None:
    root.replace(status.PATH, json.dumps(value))


# -- writing and reading -------------------------------------------------------------------


def test_written_when_changed_and_once_a_second(root: SysRoot) -> None:
    writer = status.Writer(root)
    assert writer.due(100.0)
    assert writer.write(snapshot(), 100.0) is None
    assert [writer.deadline, writer.due(200.0)] == [None, False]  # nothing changed
    writer.touch()
    assert [writer.deadline, writer.due(100.5), writer.due(101.0)] == [101.0, False, True]


def test_counters_alone_are_written_less_often(root: SysRoot) -> None:
    writer = status.Writer(root)
    assert writer.write(snapshot(), 100.0) is None
    writer.count()
    assert [writer.deadline, writer.due(101.0), writer.due(102.0)] == [102.0, False, True]
    writer.touch()
    writer.count()
    assert writer.deadline == 101.0


def test_a_status_that_cannot_be_written_is_said_once(root: SysRoot) -> None:
    writer = status.Writer(root)
    root.path("/run/moetuner").write_text("a file where a directory should be")
    problem = writer.write(snapshot(), 1.0)
    assert problem and "status.json" in problem
    assert writer.due(2.0)  # tried again, although nothing else changes
    assert writer.write(snapshot(), 2.0) is None
    root.path("/run/moetuner").unlink()
    assert writer.write(snapshot(), 3.0) is None
    assert not writer.due(4.0)
    assert status.read(root)["pid"] == os.getpid()
    writer.remove()
    writer.remove()
    with pytest.raises(NotSo, match="is not running"):
        status.read(root)


def test_what_a_killed_daemon_left_behind_is_no_status(root: SysRoot) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    put(root, snapshot(pid=ended.pid))
    with pytest.raises(NotSo, match="is not running"):
        status.read(root)
    assert cli.main(["restore", "--root", str(root.root)]) == 0
    assert not root.exists(status.PATH)


@pytest.mark.parametrize("pid", [None, "x", 0, -1, 1 << 40])
def test_a_pid_that_is_none(root: SysRoot, pid: object) -> None:
    put(root, snapshot(pid=pid))
    with pytest.raises(NotSo, match="is not running"):
        status.read(root)


def test_every_user_may_read_it(public: Public) -> None:
    directory = public.board(ORIN_NANO_JP6)
    put(SysRoot(directory), snapshot())
    done = public.run("status", "--root", directory)
    root_file = directory / status.PATH.lstrip("/")
    root_file.unlink()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("floor       not raised (idle)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "another version"),
        ('{"version": 2}', "another version"),
    ],
)
def test_a_status_that_is_none(root: SysRoot, text: str, message: str) -> None:
    root.replace(status.PATH, text)
    with pytest.raises(MoetunerError, match=message):
        status.read(root)
    assert cli.main(["status", "--root", str(root.root)]) == 4


def test_a_status_of_somebody_else_s_making(root: SysRoot) -> None:
    put(root, snapshot())
    root.path(status.PATH).chmod(0o666)
    with pytest.raises(MoetunerError, match="writable by others"):
        status.read(root)


def test_json_is_the_file(root: SysRoot, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, snapshot(processes=[SERVER]))
    assert cli.main(["status", "--json", "--root", str(root.root)]) == 0
    assert json.loads(capsys.readouterr().out) == snapshot(processes=[SERVER])


# -- for people ----------------------------------------------------------------------------


def shown(value: status.Snapshot) -> dict[str, str]:
    return dict(statusview.rows(value, Sample(), {}))


def test_idle(root: SysRoot, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, snapshot())
    assert cli.main(["status", "--root", str(root.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "floor       not raised (idle)"
    assert lines[1] == "GPU         306 MHz of 306 MHz to 1020 MHz, load 20 % (17000000.gpu)"
    assert lines[2] == "power       8.05 W (INA3221 VDD_IN)"
    assert lines[3] == "hottest     51.2 °C (tj-thermal)"
    assert lines[4] == "processes   none has called llama.cpp yet"
    assert lines[5] == "watching    no llama.cpp found yet"
    assert lines[6].endswith("3 wake-ups, 0 records lost, 1 unmatched returns, 2 unwound calls")


def test_raised() -> None:
    floor = {**IDLE["floor"], "raised_hz": 1020 * MHZ, "found_hz": 306 * MHZ}
    floor["who"] = "pid 2213 llama-server inference"
    value = snapshot(floor=floor, processes=[SERVER])
    assert shown(value)["floor"] == "1020 MHz (pid 2213 llama-server inference); 306 MHz was found"
    assert shown(value)["processes"] == "pid 2213 llama-server: 120 calls, infers; --cpu-moe"
    rated = dict(statusview.rows(value, Sample(), {2213: 12.34}))
    assert rated["processes"] == "pid 2213 llama-server: 120 calls, 12.3 calls/s, infers; --cpu-moe"


def test_a_floor_that_could_not_be_put_back_yet() -> None:
    floor = {**IDLE["floor"], "raised_hz": 1020 * MHZ, "found_hz": 306 * MHZ}
    text = shown(snapshot(floor=floor))["floor"]
    assert text == "1020 MHz (idle, but not put back yet); 306 MHz was found"


def test_why_it_is_not_raised() -> None:
    floor = {**IDLE["floor"], "who": "pid 1 x inference", "obstacle": "throttling: hot"}
    assert shown(snapshot(floor=floor))["floor"] == (
        "not raised, although pid 1 x inference: throttling: hot"
    )


def test_processes_that_do_not_count_and_more_than_are_listed() -> None:
    other = {**SERVER, "counts": False, "infers": False, "reason": "no flag"}
    totals = {"processes": 5, "counting": 1, "inferring": 1}
    rows = statusview.rows(snapshot(processes=[SERVER, other], totals=totals), Sample(), {})
    at = [name for name, _ in rows].index("processes")
    assert rows[at + 1] == ("", "pid 2213 llama-server: not counted; no flag")
    assert rows[at + 2] == ("", "and 3 more")


def test_without_a_node_and_with_files_that_could_not_be_watched() -> None:
    libraries = [
        {"path": "/a", "state": "attached", "functions": ["llama_decode"], "why": None},
        {"path": "/b", "state": "failed", "functions": [], "why": "cannot attach probes: EIO"},
    ]
    value = snapshot(node=None, libraries=libraries)
    value["configuration"]["error"] = "/etc/x.yaml:3: no"
    rows = statusview.rows(value, Sample(), {})
    assert ("GPU", "no devfreq node yet") in rows
    assert ("watching", "/a attached (llama_decode)") in rows
    assert ("", "/b failed: cannot attach probes: EIO") in rows
    assert ("config", "not reloaded: /etc/x.yaml:3: no") in rows


def test_a_board_that_tells_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thor has no load file, and its clock reads 0 while the GPU sleeps."""
    THOR.write(tmp_path)
    root = SysRoot(tmp_path)
    put(root, snapshot(node="gpu-gpc-0"))
    assert cli.main(["status", "--root", str(tmp_path)]) == 0
    assert "GPU         0 MHz of 54 MHz to 1575 MHz (gpu-gpc-0)\n" in capsys.readouterr().out


# -- rates ---------------------------------------------------------------------------------


def test_rates_between_two_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2002.0)
    rates = statusview.Rates()
    assert rates.update(snapshot(updated=2000.0, processes=[SERVER])) == {}
    later = snapshot(updated=2002.0, processes=[{**SERVER, "calls": 140}])
    assert rates.update(later) == {2213: 10.0}
    assert rates.update(later) == {2213: 10.0}  # read again before it was written again
    # While only counters run on it is written every two seconds.
    monkeypatch.setattr("time.time", lambda: 2004.1)
    assert rates.update(later) == {2213: 10.0}
    monkeypatch.setattr("time.time", lambda: 2010.0)
    assert rates.update(later) == {2213: 0.0}  # nothing has happened for long
    # Another process under the same pid begins at nothing.
    fewer = snapshot(updated=2009.0, processes=[{**SERVER, "calls": 7}])
    assert rates.update(fewer) == {}
