"""Whatever ends the daemon, min_freq is what it was before.

./run-tests daemon -k restore
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bpf.harness import Driver
from tests.daemon.harness import HIGHEST, LOWEST, Stage, until
from tests.support.boards import ORIN_NANO_JP6

pytestmark = pytest.mark.root
FOUND = 408_000_000  # a floor that somebody had set: not what a daemon would guess
Callers = Callable[..., Driver]


@pytest.fixture
def infers(caller: Callers) -> Driver:
    """A process that counts; it is inside a call between `inside process` and `return`."""
    return caller("--cpu-moe")


def test_after_sigkill_restore_puts_back(stage: Stage, infers: Driver, library: Path) -> None:
    stage.write("min_freq", FOUND)
    daemon = stage.daemon()
    daemon.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    daemon.kill()
    assert stage.min_hz() == HIGHEST  # nobody was left to put it back

    done = stage.restore()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"floor 408 MHz (left raised by process {daemon.pid}, which ended)\n"
    assert stage.min_hz() == FOUND
    again = stage.restore()
    assert (again.returncode, again.stdout, again.stderr) == (0, "nothing was saved\n", "")
    assert stage.min_hz() == FOUND


def test_after_sigkill_the_next_daemon_puts_back(
    stage: Stage, infers: Driver, library: Path
) -> None:
    stage.write("min_freq", FOUND)
    first = stage.daemon()
    first.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    first.kill()

    second = stage.daemon()
    assert second.lines[0] == f"floor 408 MHz (left raised by process {first.pid}, which ended)"
    assert stage.min_hz() == FOUND
    # And it finds what was there before, not what the first one left.
    second.await_watching(library)
    infers.ask("return")
    infers.ask("call process 1")
    second.await_line(r"floor 408 MHz \(idle\)")
    assert stage.min_hz() == FOUND


@pytest.mark.parametrize("number", [15, 2], ids=["SIGTERM", "SIGINT"])
def test_a_signal_puts_back(stage: Stage, infers: Driver, library: Path, number: int) -> None:
    daemon = stage.daemon()
    daemon.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    assert daemon.stop(number) == 0
    assert stage.min_hz() == LOWEST
    assert daemon.lines[-1] == "floor 306 MHz (stopping)"
    assert sorted(os.listdir(stage.board.root / "run/moetuner")) == ["daemon.lock"]
    infers.ask("return")  # it runs on as if nothing had been there
    assert infers.ask("call process 2") == "12"


def test_restore_lets_a_running_daemon_do_it(stage: Stage, infers: Driver, library: Path) -> None:
    daemon = stage.daemon()
    daemon.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    done = stage.restore()
    assert done.returncode == 1
    assert re.fullmatch(
        rf"moetuner: a moetuner daemon is running \(pid {daemon.pid}\) \(.*\)\n", done.stderr
    )
    assert stage.min_hz() == HIGHEST


def test_a_second_daemon_says_who_runs_and_disturbs_nothing(
    stage: Stage, infers: Driver, library: Path
) -> None:
    first = stage.daemon()
    first.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    second = stage.launch()
    assert second.process.wait(60) == 1
    (line,) = second.lines
    assert line.startswith(f"moetuner: a moetuner daemon is running (pid {first.pid})")
    assert stage.min_hz() == HIGHEST
    infers.ask("return")
    first.await_line(r"floor 306 MHz \(idle\)")


def test_what_could_not_be_put_back_is_left_to_restore(
    stage: Stage, infers: Driver, library: Path
) -> None:
    daemon = stage.daemon()
    daemon.await_watching(library)
    infers.ask("inside process")
    stage.await_min(HIGHEST)
    stage.board.fail("min_freq", errno.EIO)
    daemon.stop()
    assert "min_freq: Input/output error" in daemon.lines[-1]
    done = stage.restore()
    assert done.returncode == 4
    assert re.fullmatch("min_freq is still raised: .*: Input/output error\n", done.stderr)
    stage.board.fail("min_freq", None)
    assert stage.restore().returncode == 0
    assert stage.min_hz() == LOWEST


def test_of_three_that_start_at_once_one_runs(stage: Stage) -> None:
    daemons = [stage.launch() for _ in range(3)]

    def decided() -> bool:
        running = [daemon for daemon in daemons if daemon.process.poll() is None]
        return len(running) == 1 and "ready" in running[0].lines

    until(decided, "one is ready, two have ended", stage.told)
    assert sorted(daemon.process.poll() or 0 for daemon in daemons) == [0, 1, 1]


def test_only_root_may_write_what_is_believed_later(stage: Stage) -> None:
    daemon = stage.daemon()
    until(daemon.status, "status", daemon.text)
    directory = stage.board.root / "run/moetuner"
    for path in (directory, *directory.iterdir()):
        status = path.stat()
        assert status.st_uid == os.geteuid() and not status.st_mode & 0o022, path


def test_a_signal_while_it_starts(stage: Stage) -> None:
    """Whenever it comes, it ends, and says nothing that nobody understands."""
    for delay in (0.05, 0.3, 0.5, 0.8):
        daemon = stage.launch()
        time.sleep(delay)
        # By the signal itself before it is handled; nothing is raised then.
        assert daemon.stop() in (0, -signal.SIGTERM), daemon.text()
        assert "Traceback" not in daemon.text() and "unexpected" not in daemon.text()


@contextlib.contextmanager
def _load(callers: list[Driver], choose: random.Random) -> Iterator[None]:
    """Short requests with pauses around the hold time, so that the floor moves all the time."""
    end = threading.Event()
    pauses = {c.pid: [choose.uniform(0.02, 0.3) for _ in range(997)] for c in callers}

    def requests(caller: Driver) -> None:
        for index in range(1 << 30):
            if end.wait(pauses[caller.pid][index % 997]):
                return
            caller.ask("call process 3")

    threads = [threading.Thread(target=requests, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_killed_at_any_of_fifty_moments_under_load(
    caller: Callers,
    library: Path,
    tmp_path: Path,
    make_stage: Callable[[Path], contextlib.AbstractContextManager[Stage]],
) -> None:
    """Each round: a daemon, a random moment while the floor moves, SIGKILL, restore."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    callers = [caller("--cpu-moe") for _ in range(2)]
    moments = [choose.uniform(0, 0.5) for _ in range(50)]
    found = [choose.choice(ORIN_NANO_JP6.gpu_node.frequencies[:-1]) for _ in range(50)]

    def rounds(numbers: list[int], directory: Path) -> list[str]:
        """How min_freq read at the moment of each kill."""
        seen = []
        directory.mkdir()
        with make_stage(directory) as stage:
            for number in numbers:
                stage.write("min_freq", found[number])
                daemon = stage.daemon(stage.configuration("hold: 0.1"))
                daemon.await_watching(library)
                time.sleep(moments[number])
                daemon.kill()
                seen.append("raised" if stage.min_hz() == HIGHEST else "as found")
                done = stage.restore()
                assert done.returncode == 0, done.stderr
                assert stage.min_hz() == found[number], (number, daemon.text(), done.stderr)
        return seen

    with _load(callers, choose), ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(rounds, list(range(half, 50, 2)), tmp_path / f"half-{half}")
            for half in (0, 1)
        ]
        seen = [state for half in halves for state in half.result()]
    assert len(seen) == 50
    # The moments were of both kinds, or this has tested nothing.
    assert 3 <= seen.count("raised") <= 47, seen
