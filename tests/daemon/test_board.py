"""What happens to the board while the daemon runs: nodes that come and go, other people's
writes, heat, a /run that is full.

./run-tests daemon -k board
"""

from __future__ import annotations

import errno
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moetuner.floor import SETTLE_S
from tests.bpf.harness import Driver
from tests.daemon.harness import HIGHEST, HOLD_S, LOWEST, Daemon, Stage, until

pytestmark = pytest.mark.root
IDLE = r"floor 306 MHz \(idle\)"


@pytest.fixture
def infers(caller: Callable[..., Driver]) -> Driver:
    """A process that counts; it is inside a call between `inside process` and `return`."""
    return caller("--cpu-moe")


@pytest.fixture
def daemon(stage: Stage, library: Path, infers: Driver) -> Daemon:
    daemon = stage.daemon()
    daemon.await_watching(library)
    return daemon


def raised_by(infers: Driver, daemon: Daemon) -> int:
    """It is inside a call from now on; the number of lines so far."""
    infers.ask("inside process")
    daemon.await_line("floor 1020 MHz .*")
    return len(daemon.lines)


# -- the node ----------------------------------------------------------------------------


def test_a_node_that_appears_later_is_used(stage: Stage, library: Path, infers: Driver) -> None:
    """FUSE tells of no hotplug: the rescan finds it, while a call is waiting for it."""
    stage.board.vanish()
    daemon = stage.daemon()
    assert "no GPU to raise" in daemon.lines[0]
    daemon.await_watching(library)
    infers.ask("inside process")
    daemon.await_line(f"pid {infers.pid} .* keeps experts on the CPU: .*")
    stage.board.appear()
    stage.await_min(HIGHEST)
    assert len([line for line in daemon.lines if "no GPU to raise" in line]) == 1
    infers.ask("return")
    daemon.await_line(IDLE)
    assert stage.min_hz() == LOWEST


def test_a_node_that_goes_while_raised_and_comes_back(
    stage: Stage, daemon: Daemon, infers: Driver
) -> None:
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    stage.board.vanish()
    daemon.await_line(".*: waiting for it")
    before = len(daemon.lines)
    stage.board.appear()  # the driver starts anew: at its lowest
    daemon.await_line("floor 1020 MHz .*", before)
    # Writes to the new node are noticed as those to the old one were, whatever they write.
    stage.write("min_freq", HIGHEST)
    daemon.await_line("somebody else .* set min_freq 1020 MHz: .*", before)
    infers.ask("return")
    daemon.await_idle()
    assert stage.min_hz() == HIGHEST


def test_a_node_that_goes_for_good(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    stage.board.vanish()
    daemon.await_line(".*: waiting for it")
    infers.ask("return")
    until(lambda: daemon.status()["node"] is None, "status knows", daemon.text)
    assert daemon.stop() == 0
    done = stage.restore()
    assert done.returncode == 0 and "is not there" in done.stderr
    stage.board.appear()
    assert stage.restore().returncode == 0
    assert stage.min_hz() == LOWEST


def test_the_configuration_names_what_is_no_gpu(
    stage: Stage, daemon: Daemon, infers: Driver
) -> None:
    """The floor goes back, nothing else is touched, and a better configuration is obeyed."""
    other = stage.board.root / "sys/class/devfreq/15340000.vic/min_freq"
    found = other.read_text()
    before = raised_by(infers, daemon)
    daemon.reload(stage.configuration(f"hold: {HOLD_S}, node: 15340000.vic"))
    why = "15340000.vic, which the configuration names, is not a GPU"
    daemon.await_line(rf"floor 306 MHz \(another node is used: {why}\)", before)
    daemon.await_line(f"no GPU to raise: {why}", before)
    assert stage.min_hz() == LOWEST and other.read_text() == found
    before = len(daemon.lines)
    daemon.reload(stage.configuration(f"hold: {HOLD_S}, node: 17000000.gpu"))
    infers.ask("call process 1")
    daemon.await_line("floor 1020 MHz .*", before)
    infers.ask("return")
    daemon.await_line(IDLE, before)


# -- other people's writes -----------------------------------------------------------------


def test_nvpmodel_changes_the_mode_while_the_floor_is_held(
    stage: Stage, daemon: Daemon, infers: Driver
) -> None:
    """It caps max_freq and sets min_freq 0; that stands, and after it too."""
    before = raised_by(infers, daemon)
    began = time.monotonic()
    stage.write("max_freq", 612_000_000)
    time.sleep(0.1)
    stage.write("min_freq", 0)
    as_one = time.monotonic() - began < SETTLE_S  # or this machine was busy in between
    line = daemon.await_line("somebody else .*", before)
    infers.ask("call process 50")
    assert stage.min_hz() == LOWEST
    infers.ask("return")
    daemon.await_idle()
    assert stage.min_hz() == LOWEST
    if as_one:
        assert "min_freq 306 MHz and max_freq 612 MHz" in line
        assert daemon.rest(before) == [line]  # said once, and nothing else to say

    before = len(daemon.lines)
    infers.ask("call process 1")  # the next activity, within the new mode
    daemon.await_line("floor 612 MHz .*", before)
    daemon.await_line(IDLE, before)
    assert stage.min_hz() == LOWEST


def test_jetson_clocks_while_the_floor_is_held(
    stage: Stage, daemon: Daemon, infers: Driver
) -> None:
    """It sets min = max: the very value that we wrote. It stays when we go."""
    before = raised_by(infers, daemon)
    stage.write("min_freq", HIGHEST)
    line = daemon.await_line("somebody else .* set min_freq 1020 MHz: .*", before)
    infers.ask("return")
    daemon.await_idle()
    assert stage.min_hz() == HIGHEST
    assert daemon.rest(before) == [line]
    assert daemon.stop() == 0
    assert stage.min_hz() == HIGHEST


def test_jetson_clocks_before_anybody_infers(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    stage.write("min_freq", HIGHEST)
    infers.ask("call process 5")
    daemon.await_line("min_freq is 1020 MHz already: nothing to raise")
    daemon.await_idle()
    assert stage.writes() == [("min_freq", str(HIGHEST))]  # its own


def test_writes_in_the_very_moment_of_ours(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    """Two who write at any moment of ours going up and down: whoever comes last, our value
    never stays, and afterwards all is as ever."""
    theirs = (408_000_000, 510_000_000)
    for number in range(40):
        infers.say("call process 1")
        time.sleep(HOLD_S * (number % 8) / 6)
        stage.write("min_freq", theirs[number % 2])
        infers.answer()
    daemon.await_idle()
    assert stage.min_hz() in theirs
    found = stage.min_hz() // 1_000_000
    before = len(daemon.lines)
    infers.ask("call process 1")
    daemon.await_line("floor 1020 MHz .*", before)
    daemon.await_line(rf"floor {found} MHz \(idle\)", before)


def test_max_freq_is_lowered_while_held(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    before = raised_by(infers, daemon)
    stage.write("max_freq", 714_000_000)
    daemon.await_line(re.escape("max_freq is now 714 MHz (nvpmodel, heat or a person)"), before)
    daemon.await_line("floor 714 MHz .*", before)
    stage.write("max_freq", HIGHEST)
    daemon.await_line("floor 1020 MHz .*", before)
    infers.ask("return")
    daemon.await_line(IDLE, before)
    assert stage.min_hz() == LOWEST


def test_the_configured_floor_is_rounded_and_says_so(
    stage: Stage, library: Path, infers: Driver
) -> None:
    daemon = stage.daemon(stage.configuration("hold: 0.3, frequency: 700 MHz"))
    daemon.await_watching(library)
    infers.ask("call process 1")
    daemon.await_line("700 MHz is not supported by 17000000.gpu: 714 MHz is used")
    daemon.await_line("floor 714 MHz .*")
    daemon.await_line(IDLE)


def test_a_node_that_refuses_to_be_written(stage: Stage, daemon: Daemon, infers: Driver) -> None:
    stage.board.fail("min_freq", errno.EPERM)
    infers.ask("call process 20")
    daemon.await_line("cannot write 1020000000 to .*/min_freq: Operation not permitted")
    daemon.await_idle()
    stage.board.fail("min_freq", None)
    infers.ask("call process 1")
    daemon.await_line("floor 1020 MHz .*")
    daemon.await_line(IDLE)


# -- heat --------------------------------------------------------------------------------


def test_a_board_that_throttles_gets_its_clock_back(
    stage: Stage, daemon: Daemon, infers: Driver
) -> None:
    alert = "/sys/class/thermal/cooling_device5"
    assert stage.board.root.joinpath(f"{alert}/type".lstrip("/")).read_text() == (
        "gpu-throttle-alert\n"
    )
    infers.ask("forever 1 process")
    stage.await_min(HIGHEST)
    stage.board.set(f"{alert}/cur_state", "1\n")
    daemon.await_line(r"floor 306 MHz \(throttling: gpu-throttle-alert 1 of 1\)")
    assert stage.min_hz() == LOWEST
    until(lambda: daemon.status()["floor"]["obstacle"], "status says why", daemon.text)
    before = len(daemon.lines)
    stage.board.set(f"{alert}/cur_state", "0\n")
    daemon.await_line("floor 1020 MHz .*", before)  # later, so that it does not flap
    infers.kill()
    daemon.await_line(IDLE, before)
    assert len(daemon.floors()) == 4


# -- a /run that does not take the baseline ------------------------------------------------


@pytest.fixture
def run_tmpfs(stage: Stage) -> Iterator[Path]:
    """The board's /run as a file system of its own, as on a board."""
    path = stage.board.root / "run"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", path], check=True)
    yield path
    stage.close()
    subprocess.run(["umount", "-l", path], check=True)


def _fill(directory: Path) -> Path:
    """A file that takes all that is left."""
    path = directory / "somebody-else-s"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


def test_no_floor_without_a_saved_baseline_when_run_is_full(
    stage: Stage, run_tmpfs: Path, library: Path, infers: Driver
) -> None:
    daemon = stage.daemon()
    daemon.await_watching(library)
    filler = _fill(run_tmpfs)
    infers.ask("call process 20")
    daemon.await_line("cannot write .*/run/moetuner/baseline.json: No space left on device")
    daemon.await_line(".*/status.json: No space left on device: moetuner status will not work")
    assert stage.writes() == []
    filler.unlink()
    daemon.await_idle()  # status is written again
    infers.ask("call process 1")
    daemon.await_line("floor 1020 MHz .*")
    daemon.await_line(IDLE)
    assert len(daemon.floors()) == 2


def test_no_floor_without_a_saved_baseline_when_run_is_read_only(
    stage: Stage, run_tmpfs: Path, library: Path, infers: Driver
) -> None:
    daemon = stage.daemon()
    daemon.await_watching(library)
    directory = run_tmpfs / "moetuner"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", directory], check=True)
    try:
        infers.ask("call process 20")
        daemon.await_line("cannot write .*/run/moetuner/baseline.json: Read-only file system")
        assert daemon.stop() == 0
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
    assert stage.writes() == []
    assert "Traceback" not in daemon.text()


def test_a_daemon_that_starts_on_a_read_only_run_says_so(stage: Stage, run_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", run_tmpfs], check=True)
    daemon = stage.launch()
    assert daemon.process.wait(60) == 4
    (line,) = daemon.lines
    assert line.startswith("moetuner: cannot open ") and "Read-only file system" in line
