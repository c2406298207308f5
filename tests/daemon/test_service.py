"""The daemon as a service: what it tells its manager, SIGHUP, names from others, load.

./run-tests daemon -k service
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.bpf.harness import Driver
from tests.bpf.natives import Natives, copy
from tests.daemon.harness import (
    HIGHEST,
    LOWEST,
    PATIENCE_S,
    REPOSITORY,
    UNKNOWN,
    Daemon,
    Stage,
    moetuner,
    stopped,
    until,
)

pytestmark = pytest.mark.root
Callers = Callable[..., Driver]
IDLE = r"floor 306 MHz \(idle\)"


def await_held(daemon: Daemon, before: dict[str, int], ours: Path) -> None:
    """Until it holds what it held before, and not a descriptor or thread more."""

    def more() -> dict[str, tuple[int, int]]:
        now = daemon.held(ours)
        numbers = {kind: (before.get(kind, 0), now.get(kind, 0)) for kind in {*before, *now}}
        return {k: (a, b) for k, (a, b) in numbers.items() if a != b and UNKNOWN not in (a, b)}

    until(lambda: not more(), "as before", lambda: str(more()))


# -- the manager -------------------------------------------------------------------------


def test_what_the_manager_is_told(stage: Stage, caller: Callers, library: Path) -> None:
    process = caller("--cpu-moe")
    daemon = stage.daemon(env={"WATCHDOG_USEC": "400000"})
    ready = next(notice for notice in daemon.notices if "READY=1" in notice)
    assert ready == "READY=1\nSTATUS=idle; 0 llama.cpp files watched"
    daemon.await_watching(library)
    process.ask("inside process")
    raised = rf"STATUS=floor 1020 MHz \(pid {process.pid} .* inference\); \d+ llama.cpp .* watched"
    until(lambda: any(re.fullmatch(raised, notice) for notice in daemon.notices), "STATUS")
    process.ask("return")
    until(lambda: re.match("STATUS=idle; ", daemon.notices[-2:][0]), "STATUS idle")
    # Alive, without anything to do.
    told = daemon.notices.count("WATCHDOG=1")
    until(lambda: daemon.notices.count("WATCHDOG=1") >= told + 3, "WATCHDOG")
    assert daemon.stop() == 0
    assert daemon.notices[-1] == "STOPPING=1"
    states = [notice for notice in daemon.notices if notice.startswith("STATUS=")]
    assert all(a != b for a, b in itertools.pairwise(states))  # only what is new


def test_no_watchdog_unless_asked_for(stage: Stage) -> None:
    daemon = stage.daemon()
    assert daemon.stop() == 0
    assert "WATCHDOG=1" not in daemon.notices


def test_a_manager_that_reads_nothing_stops_nothing(
    stage: Stage, caller: Callers, library: Path
) -> None:
    """A socket takes ten datagrams, then it is full."""
    process = caller("--cpu-moe")
    daemon = stage.launch(env={"WATCHDOG_USEC": "20000"})
    daemon.await_line("ready")
    daemon.await_watching(library)
    time.sleep(0.5)  # twenty-five notices
    process.ask("call process 1")
    daemon.await_line(IDLE)
    assert daemon.stop() == 0


def test_a_name_beyond_ascii_reaches_the_manager(
    stage: Stage, caller: Callers, natives: Natives, library: Path, tmp_path: Path
) -> None:
    program = tmp_path / "läuft-模型"
    copy(natives.driver, program)
    process = caller("--cpu-moe", program=program)
    daemon = stage.daemon()
    daemon.await_watching(library)
    process.ask("inside process")
    daemon.await_line(rf"floor 1020 MHz \(pid {process.pid} läuft-模.* inference\)")
    until(lambda: any("läuft-模" in notice for notice in daemon.notices), "STATUS")
    daemon.reload(stage.configuration())  # READY=1 comes with the same STATUS


# -- SIGHUP ------------------------------------------------------------------------------


def test_a_reload_takes_effect_at_once(stage: Stage, caller: Callers, library: Path) -> None:
    process = caller("--cpu-moe")
    daemon = stage.daemon(stage.configuration("hold: 60"))
    daemon.await_watching(library)
    process.ask("forever 1 process")
    stage.await_min(HIGHEST)
    daemon.reload(stage.configuration("hold: 0.3, frequency: 612 MHz"))
    assert any(notice.startswith("RELOADING=1\nMONOTONIC_USEC=") for notice in daemon.notices)
    daemon.await_line(f"configuration reloaded from {daemon.config}")
    daemon.await_line(rf"floor 612 MHz \(pid {process.pid} .*\)")
    daemon.reload(stage.configuration("hold: 0.3", match='buffer_types: ["NONE"]'))
    daemon.await_line(f"pid {process.pid} .* does not count: .*")
    daemon.await_line(IDLE)
    before = len(daemon.lines)
    daemon.reload(stage.configuration("hold: 0.3"))
    daemon.await_line("floor 1020 MHz .*", before)
    process.kill()
    daemon.await_line(IDLE, before)
    assert stage.min_hz() == LOWEST


def _attached(daemon: Daemon, library: Path, returns: str) -> bool:
    wanted = {"path": str(library), "state": "attached", "returns": returns}
    return any(wanted.items() <= each.items() for each in daemon.status()["libraries"])


def test_reloads_leave_nothing_open(stage: Stage, caller: Callers, library: Path) -> None:
    """Each attaches every file anew, in the other of two ways."""
    process = caller("--cpu-moe")
    daemon = stage.daemon()
    daemon.await_watching(library)
    process.ask("call process 1")
    daemon.await_line(IDLE)

    def reload_twice() -> None:
        for returns in ("uretprobe", "sites"):
            daemon.reload(stage.configuration(watch=f"returns: {returns}"))
            until(partial(_attached, daemon, library, returns), f"{returns} again", daemon.text)

    reload_twice()  # from then on there is a thread that takes probes out
    before = daemon.held(stage.ours)
    for _ in range(3):
        reload_twice()
    since = len(daemon.lines)
    process.ask("call process 3")
    daemon.await_line("floor 1020 MHz .*", since)
    daemon.await_line(IDLE, since)
    await_held(daemon, before, stage.ours)


def test_a_broken_file_changes_nothing(stage: Stage, caller: Callers, library: Path) -> None:
    process = caller("--cpu-moe")
    good = stage.configuration("hold: 0.3, frequency: 612 MHz")
    daemon = stage.daemon(good)
    daemon.await_watching(library)
    daemon.reload(good + "match2: {}\n")
    line = daemon.await_line("configuration not reloaded, the old one stays: .*")
    assert f"{daemon.config}:4: unknown key match2" in line
    until(lambda: daemon.status()["configuration"]["error"], "status says so")
    shown = moetuner("status", "--root", stage.board.root)
    assert f"not reloaded: {daemon.config}:4: unknown key match2" in shown.stdout
    process.ask("call process 1")
    daemon.await_line("floor 612 MHz .*")  # as the old one says
    daemon.reload(good)
    until(lambda: daemon.status()["configuration"]["error"] is None, "status is well again")


def test_a_file_that_is_gone_changes_nothing(stage: Stage) -> None:
    daemon = stage.daemon()
    daemon.config.unlink()
    daemon.process.send_signal(1)
    daemon.await_line(f"configuration not reloaded, the old one stays: {daemon.config}: no such .*")


# -- who reads -----------------------------------------------------------------


def test_nobody_reads_the_log(stage: Stage, caller: Callers, library: Path) -> None:
    """`moetuner daemon 2>&1 | head -1`: it goes on, and puts back."""
    process = caller("--cpu-moe")
    command = [sys.executable, "-m", "moetuner", "daemon", "--root", str(stage.board.root)]
    config = stage.directory / "moetuner.yaml"
    config.write_text(stage.configuration())
    daemon = subprocess.Popen(
        [*command, "--config", str(config)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    assert daemon.stderr
    while not daemon.stderr.readline().startswith(f"watching {library}"):
        assert daemon.poll() is None
    daemon.stderr.close()
    process.ask("inside process")
    stage.await_min(HIGHEST)
    process.ask("return")
    stage.await_min(LOWEST)
    daemon.terminate()
    assert daemon.wait(PATIENCE_S) == 0


# -- names from others ---------------------------------------------------------------------


def test_hostile_names_forge_nothing(
    stage: Stage, caller: Callers, natives: Natives, library: Path, tmp_path: Path
) -> None:
    """The kernel gives the first 15 bytes of the program's name, whatever they are."""
    program = tmp_path / "a\nfloor 1\x1b[31m"
    copy(natives.driver, program)
    process = caller("--cpu-moe\n<0>forged", "--cpu-moe", program=program)
    daemon = stage.daemon()
    daemon.await_watching(library)
    process.ask("inside process")
    daemon.await_line(rf"floor 1020 MHz \(pid {process.pid} a\\nfloor 1\\x1b\[31m inference\)")
    until(lambda: daemon.process_status(process.pid), "in status")
    shown = moetuner("status", "--root", stage.board.root)
    assert shown.returncode == 0 and f"pid {process.pid} a\\nfloor 1" in shown.stdout
    checked = moetuner("check", "--root", stage.board.root, "--config", daemon.config)
    assert f"pid {process.pid} a\\nfloor 1" in checked.stdout
    for text in (daemon.text(), shown.stdout, checked.stdout, *daemon.notices):
        assert "\x1b" not in text and "\nfloor 1\n" not in text and "\n<0>" not in text


# -- load --------------------------------------------------------------------------------


def test_two_hundred_short_lived_callers(stage: Stage, caller: Callers, library: Path) -> None:
    """Ended before anybody could ask who they were, or not: the floor comes back, every
    record of them goes, and nothing is left open."""
    parent = caller("--cpu-moe")
    daemon = stage.daemon()
    daemon.await_watching(library)
    parent.ask("call process 1")
    daemon.await_line(IDLE)
    before = daemon.held(stage.ours)
    for _ in range(10):
        parent.ask("children 20 process")
    await_held(daemon, before, stage.ours)
    daemon.await_idle()
    stage.await_min(LOWEST)
    until(lambda: daemon.status()["totals"]["processes"] >= 1, "status")
    assert [p["pid"] for p in daemon.status()["processes"] if p["infers"]] == []
    assert daemon.process_status(parent.pid)["counts"]


def test_the_library_is_rebuilt_under_a_running_server(
    stage: Stage, caller: Callers, natives: Natives, library: Path, tmp_path: Path
) -> None:
    """The linker makes a new file under the old name: both are watched while both run."""
    old = caller("--cpu-moe")
    daemon = stage.daemon()
    daemon.await_watching(library)
    rebuilt = tmp_path / "libllama.so.new"
    copy(natives.library("plain.cpp", "-O1"), rebuilt)
    rebuilt.rename(library)
    before = len(daemon.lines)
    new = caller("--cpu-moe")
    daemon.await_line(f"watching {re.escape(str(library))} .*", before)
    for process in (old, new):
        before = len(daemon.lines)
        process.ask("call process 3")
        daemon.await_line(rf"floor 1020 MHz \(pid {process.pid} .*\)", before)
        daemon.await_line(IDLE, before)
    old.kill()
    before = len(daemon.lines)
    daemon.reload(stage.configuration())  # scans, which it does every few minutes otherwise
    daemon.await_line(f"no longer watching {re.escape(str(library))}.* deleted .*", before)
    new.ask("call process 3")
    daemon.await_line(rf"floor 1020 MHz \(pid {new.pid} .*\)", before)


def test_the_daemon_stands_still_for_a_while(stage: Stage, caller: Callers, library: Path) -> None:
    """Stopped while idle, while a call begins, while one ends, and while a whole one passes."""
    process = caller("--cpu-moe")
    daemon = stage.daemon()
    daemon.await_watching(library)
    with stopped(daemon.pid):
        time.sleep(1)
    assert stage.writes() == []

    with stopped(daemon.pid):
        process.ask("inside process")
        time.sleep(3)
        assert stage.min_hz() == LOWEST
    stage.await_min(HIGHEST)  # late, but the call is still under way

    with stopped(daemon.pid):
        process.ask("return")
        time.sleep(1)
        assert stage.min_hz() == HIGHEST
    daemon.await_line(IDLE)

    before = len(daemon.lines)
    with stopped(daemon.pid):  # begun and ended, all in the past by then
        process.ask("call process 5")
        time.sleep(1)
    daemon.await_line(IDLE, before)
    assert stage.min_hz() == LOWEST
    assert daemon.status()["probe"]["lost"] == 0
