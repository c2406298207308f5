"""Calls that never return, processes that change: none may look as if it infers for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetuner.watch.callers import Look
from moetuner.watch.processes import Process, ProcFs
from tests.bpf.conftest import Start
from tests.bpf.harness import Driver, Rig
from tests.bpf.natives import Natives, copy

pytestmark = pytest.mark.root
GONE = Look(None, None, False)
both = pytest.mark.parametrize("rig", ["sites", "uretprobe"], indirect=True)
sites = pytest.mark.parametrize("rig", ["sites"], indirect=True)
uretprobe = pytest.mark.parametrize("rig", ["uretprobe"], indirect=True)


def begin(rig: Rig, driver: Driver, line: str = "inside decode") -> None:
    """A call that is known and goes on."""
    assert driver.ask(line) == "inside"
    rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    assert rig.in_flight(driver.pid)


def ended(rig: Rig, pid: int) -> None:
    rig.until(lambda: pid in rig.ends, f"the end of {pid}")
    assert pid not in rig.watcher.callers.known
    assert rig.inside(pid) == []
    assert rig.look(pid) == GONE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killed_inside(rig: Rig, driver: Driver, number: signal.Signals) -> None:
    begin(rig, driver)
    assert driver.kill(number) == -number
    ended(rig, driver.pid)


def test_exit_inside(rig: Rig, driver: Driver) -> None:
    begin(rig, driver)
    assert driver.process.stdin
    driver.process.stdin.close()
    assert driver.wait() == 0
    ended(rig, driver.pid)


@pytest.mark.parametrize("how", ["pthread_exit", "cancel"])
def test_thread_ends_inside(rig: Rig, driver: Driver, how: str) -> None:
    driver.say("thread")
    begin(rig, driver)
    assert driver.ask(how) == "joined"
    assert not rig.in_flight(driver.pid)
    assert driver.pid in rig.watcher.callers.known
    assert driver.ask("call decode 2") == "10"
    assert not rig.in_flight(driver.pid)


@sites
def test_exception_is_over_at_the_next_call(rig: Rig, driver: Driver) -> None:
    begin(rig, driver)
    before = rig.watcher.counters().unwound
    assert driver.ask("throw") == "caught"
    assert driver.ask("call synchronize 1") == "2"
    assert not rig.in_flight(driver.pid)
    assert rig.watcher.counters().unwound > before


@sites
def test_exception_is_over_when_the_thread_waits_further_up(rig: Rig, driver: Driver) -> None:
    begin(rig, driver, "inside deep decode")
    assert driver.ask("throw") == "caught"
    rig.until(lambda: not rig.in_flight(driver.pid), "seen to wait outside of the call")


@sites
def test_exception_caught_close_by_shows_no_progress(rig: Rig, driver: Driver) -> None:
    """The stack cannot tell here; then the stall limit of activity.py ends it."""
    begin(rig, driver)
    assert driver.ask("throw") == "caught"
    rig.look(driver.pid)
    assert not rig.look(driver.pid).progress


@uretprobe
def test_exception_through_a_uretprobe_ends_the_program(rig: Rig, driver: Driver) -> None:
    """The C++ unwinder does not know the kernel's trampoline, and calls std::terminate.
    Should this ever pass, uretprobes have become harmless, and `sites` needless."""
    begin(rig, driver)
    assert driver.ask("throw") == ""
    assert driver.wait() == -signal.SIGABRT
    ended(rig, driver.pid)


def test_longjmp(rig: Rig, driver: Driver) -> None:
    begin(rig, driver)
    assert driver.ask("longjmp") == "jumped"
    assert driver.ask("call synchronize 23") == str(10 * 253 + 46)
    assert not rig.in_flight(driver.pid)


def test_fork_inside(rig: Rig, driver: Driver) -> None:
    begin(rig, driver)
    child = int(driver.ask("fork"))
    assert driver.ask(f"reap {child}") == str(7 << 8), "the child returned and ended"
    assert rig.look(child) == GONE
    assert rig.inside(child) == []
    assert rig.in_flight(driver.pid), "the parent is inside still"
    assert driver.ask("return") == "returned"
    assert not rig.in_flight(driver.pid)
    assert rig.told(child) == 0


# -- another program in the same process ------------------------------------------------


@pytest.fixture
def judged_by_name(rig: Rig) -> Iterator[None]:
    """Programs count if their name begins with `moe`."""
    before = rig.verdict
    rig.verdict = lambda process: (Path(process.exe).name.startswith("moe"), "its name")
    yield
    rig.verdict = before


@pytest.mark.usefixtures("judged_by_name")
def test_exec_is_judged_anew(
    rig: Rig, natives: Natives, start: Start, library: Path, tmp_path: Path
) -> None:
    moe, dense = tmp_path / "moe", tmp_path / "dense"
    copy(natives.driver, moe)
    copy(natives.driver, dense)
    driver = start(dense)
    pid = driver.pid

    def becomes(path: Path) -> None:
        assert driver.ask(f"exec {path}") == "ready"

    def calls() -> int:
        driver.load(library)
        driver.ask("call decode 5")
        return rig.told(pid)

    driver.load(library)
    rig.attached(library)
    assert calls() == 0
    assert not rig.watcher.callers.known[pid].counts
    becomes(moe)
    assert calls() == 1, "the verdict on the old program is no more"
    assert rig.watcher.callers.known[pid].counts
    assert pid not in rig.ends
    becomes(dense)
    assert calls() == 1
    assert pid in rig.ends, "what counted is over"
    assert not rig.watcher.callers.known[pid].counts
    becomes(moe)
    assert calls() == 2
    assert [Path(p.exe).name for p in rig.judged if p.pid == pid] == ["dense", "moe"] * 2


@pytest.mark.parametrize("how", ["inside decode", "hold 3 decode"])
@pytest.mark.parametrize("by", ["exec", "execthread"])
def test_exec_inside(rig: Rig, natives: Natives, driver: Driver, how: str, by: str) -> None:
    driver.ask(how)
    rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    assert rig.in_flight(driver.pid)
    assert driver.ask(f"{by} {natives.driver}") == "ready"
    assert rig.inside(driver.pid) == []
    assert rig.look(driver.pid) == GONE


def reuse(start: Start, pid: int) -> Driver:
    """A new process with the pid of one that has ended."""
    for _ in range(500):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        driver = start()
        if driver.pid == pid:
            return driver
        driver.close()
    raise AssertionError(f"pid {pid} could not be had again")


@pytest.mark.parametrize("late", [False, True], ids=["told", "not yet told"])
def test_reused_pid(rig: Rig, driver: Driver, start: Start, library: Path, late: bool) -> None:
    pid = driver.pid
    begin(rig, driver)
    if late:  # a record of the old process waits before its end, and before the new one's
        driver.ask("return")
        rig.watcher.set_hold(0)
        driver.ask("inside decode")
        rig.watcher.set_hold(1)
    driver.kill()
    if not late:
        ended(rig, pid)
    new = reuse(start, pid)
    new.load(library)
    new.ask("call decode 1")
    rig.until(lambda: rig.ends.count(pid) == 1, "the end of the old one")
    rig.settle()
    assert rig.watcher.callers.known[pid].started == ProcFs().started(pid)
    assert not rig.in_flight(pid)
    before = rig.told(pid)
    new.ask("inside decode")
    rig.watcher.set_hold(0)
    new.ask("call synchronize 1")
    rig.watcher.set_hold(1)
    assert rig.told(pid) > before
    assert rig.in_flight(pid)
    new.kill()
    rig.until(lambda: rig.ends.count(pid) == 2, "the end of the new one")


# -- many -------------------------------------------------------------------------------


def test_3000_threads(rig: Rig, driver: Driver) -> None:
    assert driver.ask("hold 3000 decode") == "holding"
    assert rig.count(driver.pid) == 3000
    rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    assert rig.in_flight(driver.pid)
    assert len(rig.inside(driver.pid)) == 3000
    driver.kill()
    ended(rig, driver.pid)


@sites
def test_more_threads_than_the_table_holds(rig: Rig, driver: Driver) -> None:
    assert driver.ask("hold 4500 decode") == "holding"
    assert rig.count(driver.pid) == 4500
    rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    assert rig.in_flight(driver.pid)
    assert driver.ask("call decode 23") == str(10 * 253)
    assert rig.count(driver.pid) == 4523
    driver.kill()
    ended(rig, driver.pid)


def test_a_process_that_ended_before_it_was_met(rig: Rig, driver: Driver) -> None:
    driver.ask("children 20 decode")
    rig.settle()
    left = [pid for pid in list(rig.watcher.program.processes.keys()) if gone(pid)]
    assert left == []
    assert [pid for pid in rig.watcher.callers.known if gone(pid)] == []


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_verdict_is_asked_once(rig: Rig, driver: Driver) -> None:
    driver.ask("threads 8 decode 100")
    driver.ask("threads 8 decode 100")
    rig.settle()
    assert [p.pid for p in rig.judged if p.pid == driver.pid] == [driver.pid]
    said = [line for line in rig.lines if line.startswith(f"pid {driver.pid} ")]
    assert len(said) == 1


def test_configuration_changes_the_verdict(rig: Rig, driver: Driver) -> None:
    before = rig.verdict
    try:
        rig.verdict = lambda process: (False, "not now")
        driver.ask("call decode 1")
        assert rig.told(driver.pid) == 0
        driver.ask("call decode 1")
        assert rig.count(driver.pid) == 1, "the kernel does not even count it"
        rig.verdict = lambda process: (True, "now")
        rig.watcher.callers.judge_again()
        driver.ask("call decode 1")
        assert rig.told(driver.pid) == 1
        rig.verdict = lambda process: (False, "no more")
        rig.watcher.callers.judge_again()
        assert driver.pid in rig.ends
    finally:
        rig.verdict = before


def test_names_cannot_forge_a_line(
    rig: Rig, natives: Natives, start: Start, library: Path, tmp_path: Path
) -> None:
    program = os.fsencode(tmp_path) + b"/a\nb\x1b[31m\xff"
    copy(natives.driver, program)
    driver = start(program)
    driver.load(library)
    rig.attached(library)
    driver.ask("call decode 1")
    rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    caller = rig.watcher.callers.known[driver.pid]
    assert caller.name.isprintable() and caller.exe.isprintable()
    assert all(line.isprintable() for line in rig.lines)


def test_environment_is_the_process_own(rig: Rig, driver: Driver) -> None:
    os.environ["MOETUNER_TEST_UNSEEN"] = "1"
    try:
        driver.ask("call decode 1")
        rig.until(lambda: driver.pid in rig.watcher.callers.known, "the process is known")
    finally:
        del os.environ["MOETUNER_TEST_UNSEEN"]
    process: Process = next(p for p in rig.judged if p.pid == driver.pid)
    assert "MOETUNER_TEST_UNSEEN" not in process.environ
    assert process.environ["PATH"] == os.environ["PATH"]
    assert process.argv == (str(driver.process.args[0].decode()),)  # type: ignore[index,union-attr]
