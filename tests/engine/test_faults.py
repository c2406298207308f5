"""A disk that is slow, refuses or fails: a slower right answer or a clear end.

The model lies on a file system of the test's own (faultfs), so it is the plugin as it is
shipped that reads, inside stock programs.
"""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moetuner.serve.build import BUFFER_TYPE
from tests.engine.faultfs import Disk, Faults, serve
from tests.engine.rig import Engine, Logits, full_environment
from tests.engine.servers import PROMPTS, Start
from tests.engine.tensors import range_of

pytestmark = pytest.mark.root

Model = Callable[[str], Path]
Mount = Callable[..., Disk]

# A batch that uses all experts, one that takes the plain kernels, and tokens one by one; in
# a cache of two or three units nearly all of them are read again for each token.
ARGUMENTS = ("--batches", "64,8", "--decode", 16, "--threads", 2)
SMALL: dict[str, Any] = {"cache_mib": 1}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount(model, Faults(…))`: a Disk that is unmounted with the test."""
    with ExitStack() as disks:

        def make(model: Path, faults: Faults | None = None, *, direct: bool = True) -> Disk:
            return disks.enter_context(serve(model, tmp_path, faults, direct=direct))

        yield make


@pytest.mark.parametrize("io", ["uring", "pool"])
@pytest.mark.parametrize(("name", "piece_kib"), [("Q8_0", 40), ("gpt-oss", 4), ("mixed", 128)])
def test_reads_that_fail_and_come_late_at_random(
    logits: Logits, model: Model, mount: Mount, name: str, piece_kib: int, io: str
) -> None:
    """A read that failed is done once more through the page cache."""
    disk = mount(model(name), Faults(errors=150, delay_ms=4))
    settings = {**SMALL, "io": io, "piece_kib": piece_kib, "io_depth": 8, "io_threads": 8}
    logits.assert_equal([disk.path], ARGUMENTS, originals=[model(name)], **settings)
    counts = disk.counts()
    assert counts["errors"] >= 10 and counts["delays"] >= 100, counts


@pytest.mark.parametrize("io", ["uring", "pool"])
def test_late_reads_in_a_cache_with_room(
    logits: Logits, model: Model, mount: Mount, io: str
) -> None:
    """Some experts are there, some are late: each operation waits for its own."""
    disk = mount(model("many"), Faults(delay_ms=10))
    logits.assert_equal(
        [disk.path], ARGUMENTS, originals=[model("many")], cache_mib=4, io=io, piece_kib=16
    )


@pytest.mark.parametrize("io", ["uring", "pool"])
def test_a_disk_that_stops_for_two_seconds(
    logits: Logits, model: Model, mount: Mount, io: str
) -> None:
    disk = mount(model("Q8_0"), Faults(after=100, stall_s=2))
    logits.assert_equal([disk.path], ARGUMENTS, originals=[model("Q8_0")], **SMALL, io=io)
    assert disk.counts()["stalls"] > 0


@pytest.mark.parametrize("io", ["uring", "pool"])
def test_direct_reads_refused_in_the_middle(
    logits: Logits, model: Model, mount: Mount, io: str
) -> None:
    disk = mount(model("Q8_0"), Faults(after=100, refusals=1000))
    got = logits.assert_equal([disk.path], ARGUMENTS, originals=[model("Q8_0")], **SMALL, io=io)
    assert len(got.lines("moetuner: direct reads of", "are refused (Invalid argument)")) == 1
    counts = disk.counts()
    assert counts["refusals"] > 0
    assert counts["direct"] < 100 + 2 * 64  # what was under way; then no more


def test_direct_reads_refused_from_the_start(logits: Logits, model: Model, mount: Mount) -> None:
    disk = mount(model("gpt-oss"), direct=False)
    got = logits.assert_equal([disk.path], ARGUMENTS, originals=[model("gpt-oss")], **SMALL)
    assert len(got.lines("moetuner: direct reads of", "are refused (Invalid argument)")) == 1
    assert disk.counts()["direct"] == 0


def _halfway(logits: Logits, disk: Disk) -> int:
    """Direct reads of half the tokens."""
    result = logits.run([disk.path], ARGUMENTS, logits.engine.environment(**SMALL))
    assert result.returncode == 0, result.log
    return disk.counts()["direct"] // 2


@pytest.mark.parametrize("io", ["uring", "pool"])
@pytest.mark.parametrize("fault", ["unreadable", "cut off"])
def test_experts_that_are_lost_in_the_middle(
    logits: Logits, model: Model, mount: Mount, fault: str, io: str
) -> None:
    """It ends at the token that needs them, and says why; all before it is right."""
    original = model("Q8_0")
    disk = mount(original)
    after = _halfway(logits, disk)
    name = "blk.1.ffn_down_exps.weight"
    begin, end = range_of(original, name)
    bad, why = ((begin, end), "Input/output error (errno 5)"), "the file ends there"
    faults = Faults(after=after, bad=bad[0]) if fault == "unreadable" else Faults(after, end=begin)
    text = bad[1] if fault == "unreadable" else why
    disk.set(faults)
    got = logits.run([disk.path], ARGUMENTS, logits.engine.environment(**SMALL, io=io))
    assert got.returncode == 1, got.log
    assert got.lines("moetuner: cannot read", str(disk.path), text), got.log
    assert got.lines(f"moetuner: {name}: cannot read"), got.log
    assert got.lines("llama_decode gave -"), got.log
    (ours,) = got.logits
    (stock,) = logits.stock([original], ARGUMENTS).logits
    assert 0 < len(ours) < len(stock)
    assert stock.startswith(ours)


@pytest.mark.parametrize("io", ["uring", "pool"])
def test_stopped_and_continued(
    logits: Logits, model: Model, mount: Mount, tmp_path: Path, io: str
) -> None:
    """SIGSTOP while reads are under way; what it waited for has long arrived on SIGCONT."""
    original, output = model("Q8_0"), tmp_path / "output"
    disk = mount(original, Faults(delay_ms=2))
    command = [logits.engine.logits, *ARGUMENTS, "--experts", BUFFER_TYPE, disk.path, output]
    process = subprocess.Popen(
        [str(word) for word in command],
        env=full_environment(logits.engine.environment(**SMALL, io=io)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for reads in (20, 100, 200):
            disk.await_direct_reads(reads)
            process.send_signal(signal.SIGSTOP)
            _await_state(process.pid, "T")
            time.sleep(0.2)
            process.send_signal(signal.SIGCONT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    assert output.read_bytes() == logits.stock([original], ARGUMENTS).logits[0]


def _await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_on_a_disk_with_a_bad_sector(
    engine: Engine, model: Model, start: Start, mount: Mount, stock_texts: list[str]
) -> None:
    """Requests that need it fail, with 500; others do not; all is well when it can be read."""
    disk = mount(model("Q4_K"))
    server = start("-m", disk.path, "--no-warmup", env=engine.environment(cache_mib=1))
    assert server.text(PROMPTS[1]) == stock_texts[1]
    disk.set(Faults(bad=range_of(model("Q4_K"), "blk.0.ffn_up_exps.weight")))
    with pytest.raises(urllib.error.HTTPError) as failure:
        server.text(PROMPTS[3])
    assert failure.value.code == 500
    assert server.said("moetuner: cannot read", str(disk.path), "errno 5")
    disk.set(Faults(errors=300))
    assert server.text(PROMPTS[3]) == stock_texts[3]
    disk.set(Faults())
    assert [server.text(prompt) for prompt in PROMPTS[8:]] == stock_texts[8:]
    assert server.stop() == 0
