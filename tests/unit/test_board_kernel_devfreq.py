"""The fake devfreq against the kernel's behaviour as it was tried on a real device, in
this process and through the mount."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetuner.board.baseline import BaselineFile, Outcome, recover
from moetuner.board.devfreq import Devfreq, NodeGone, find
from moetuner.board.sysroot import SysRoot
from moetuner.board.throttle import Throttle
from tests.support.boards import MHZ, ORIN_NANO_JP6, THOR
from tests.support.devfreqfs import Mounted, mount
from tests.support.kernel_devfreq import KernelDevfreq, Write
from tests.support.machine import cannot

ALERT = "/sys/class/thermal/cooling_device5/cur_state"  # gpu-throttle-alert's
FREQUENCIES = ORIN_NANO_JP6.gpu_node.frequencies

# what is written to min_freq → what it reads, and cur_freq
MIN = [
    ("612000000", 612_000_000, 612_000_000),
    ("612000000\n", 612_000_000, 612_000_000),
    ("700000000", 700_000_000, 714_000_000),
    ("612001000", 612_001_000, 714_000_000),
    ("612000999", 612_000_000, 612_000_000),  # floored to kHz
    ("0", 306_000_000, 306_000_000),
    ("1", 306_000_000, 306_000_000),
    ("100000000", 306_000_000, 306_000_000),
    ("2000000000", 1_020_000_000, 1_020_000_000),
    ("714000000xyz", 714_000_000, 714_000_000),
    ("0x10", 306_000_000, 306_000_000),
    ("1e9", 306_000_000, 306_000_000),
    ("4294967295000", 306_000_000, 306_000_000),  # overflow
]
REFUSED = ["abc", "-1", "\n", "+5"]
# what is written to max_freq → what it reads
MAX = [
    ("612000000", 612_000_000),
    ("611999001", 612_000_000),  # ceiled to kHz
    ("700000000", 700_000_000),
    ("0", 1_020_000_000),  # no limit
    ("2000000000", 1_020_000_000),
]


@pytest.fixture
def kernel() -> KernelDevfreq:
    return KernelDevfreq(FREQUENCIES)


@pytest.fixture(scope="module")
def fs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    if not Path("/dev/fuse").exists():
        cannot("no /dev/fuse")
    with mount(ORIN_NANO_JP6, tmp_path_factory.mktemp("board")) as mounted:
        yield mounted


@pytest.fixture
def fresh(fs: Mounted) -> Mounted:
    """The mounted board with nothing set."""
    fs.fail("min_freq", None)
    fs.appear()
    fs.set(ALERT, "0\n")
    fs.path("max_freq").write_text("0")
    fs.path("min_freq").write_text("0")
    return fs


def number(path: Path) -> int:
    return int(path.read_text())


@pytest.mark.parametrize(("text", "reads", "current"), MIN)
def test_min_freq(kernel: KernelDevfreq, text: str, reads: int, current: int) -> None:
    kernel.write("min_freq", text)
    assert kernel.read("min_freq") == f"{reads}\n"
    assert kernel.read("cur_freq") == f"{current}\n"


@pytest.mark.root
@pytest.mark.parametrize(("text", "reads", "current"), MIN)
def test_min_freq_through_the_mount(fresh: Mounted, text: str, reads: int, current: int) -> None:
    fresh.path("min_freq").write_text(text)
    assert number(fresh.path("min_freq")) == reads
    assert number(fresh.path("cur_freq")) == current


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.parametrize("attribute", ["min_freq", "max_freq"])
def test_no_number_is_refused(kernel: KernelDevfreq, attribute: str, text: str) -> None:
    kernel.write(attribute, "714000000")
    with pytest.raises(OSError) as caught:
        kernel.write(attribute, text)
    assert caught.value.errno == errno.EINVAL
    assert kernel.read(attribute) == "714000000\n"


@pytest.mark.root
@pytest.mark.parametrize("text", REFUSED)
def test_no_number_is_refused_through_the_mount(fresh: Mounted, text: str) -> None:
    fresh.path("min_freq").write_text("714000000")
    with pytest.raises(OSError) as caught:
        fresh.path("min_freq").write_text(text)
    assert caught.value.errno == errno.EINVAL
    assert number(fresh.path("min_freq")) == 714_000_000


@pytest.mark.parametrize(("text", "reads"), MAX)
def test_max_freq(kernel: KernelDevfreq, text: str, reads: int) -> None:
    kernel.write("max_freq", text)
    assert kernel.max_hz == reads


@pytest.mark.root
@pytest.mark.parametrize(("text", "reads"), MAX)
def test_max_freq_through_the_mount(fresh: Mounted, text: str, reads: int) -> None:
    fresh.path("max_freq").write_text(text)
    assert number(fresh.path("max_freq")) == reads


def test_a_larger_min_than_max_is_remembered(kernel: KernelDevfreq) -> None:
    kernel.write("min_freq", "918000000")
    kernel.write("max_freq", "510000000")
    assert kernel.min_hz == kernel.max_hz == kernel.cur_hz == 510 * MHZ
    kernel.write("max_freq", "816000000")
    assert kernel.min_hz == 816 * MHZ
    kernel.write("max_freq", "0")
    assert kernel.min_hz == 918 * MHZ


def test_putting_back_what_was_read_saves_a_clamped_value(kernel: KernelDevfreq) -> None:
    kernel.write("min_freq", "918000000")
    kernel.write("max_freq", "510000000")
    kernel.write("min_freq", kernel.read("min_freq"))
    kernel.write("max_freq", "0")
    assert kernel.min_hz == 510 * MHZ


def test_current_rounds_down_where_max_caps_it(kernel: KernelDevfreq) -> None:
    kernel.write("max_freq", "700000000")
    kernel.wish_hz = 1020 * MHZ
    assert kernel.cur_hz == 612 * MHZ


def test_the_governor_moves_between_min_and_max(kernel: KernelDevfreq) -> None:
    kernel.write("min_freq", "408000000")
    assert kernel.cur_hz == 408 * MHZ
    kernel.wish_hz = 800 * MHZ
    assert kernel.cur_hz == 816 * MHZ


def test_cur_freq_is_read_only(kernel: KernelDevfreq) -> None:
    with pytest.raises(PermissionError):
        kernel.write("cur_freq", "1020000000")


@pytest.mark.root
def test_cur_freq_is_read_only_through_the_mount(fresh: Mounted) -> None:
    with pytest.raises(PermissionError):
        fresh.path("cur_freq").write_text("1020000000")


def test_faults_and_the_log_of_writes(kernel: KernelDevfreq) -> None:
    kernel.write("min_freq", "612000000\n")
    kernel.faults["min_freq"] = errno.EIO
    with pytest.raises(OSError):
        kernel.write("min_freq", "0")
    assert kernel.min_hz == 612 * MHZ
    assert kernel.writes == [Write("min_freq", "612000000"), Write("min_freq", "0", errno.EIO)]


@pytest.mark.root
def test_controls_through_the_mount(fresh: Mounted) -> None:
    before = len(fresh.writes())
    # Any program is an external writer.
    subprocess.run(["sh", "-c", f"echo 408000000 > {fresh.path('min_freq')}"], check=True)
    assert fresh.writes()[before:] == [Write("min_freq", "408000000")]
    fresh.wish(900 * MHZ)
    assert number(fresh.path("cur_freq")) == 918 * MHZ
    fresh.fail("min_freq", errno.EIO)
    with pytest.raises(OSError) as caught:
        fresh.path("min_freq").write_text("510000000")
    assert caught.value.errno == errno.EIO
    fresh.vanish()
    assert not fresh.path("min_freq").exists()
    assert "17000000.gpu" not in [p.name for p in (fresh.root / "sys/class/devfreq").iterdir()]
    fresh.appear()
    assert number(fresh.path("min_freq")) == 306 * MHZ  # a new device, nothing remembered
    fresh.set(ALERT, "1\n")
    assert number(fresh.root / ALERT.lstrip("/")) == 1
    with pytest.raises(RuntimeError):
        fresh.set("/sys/no/such", "1")


@pytest.mark.root
def test_a_mounted_board_is_a_whole_root_and_leaves_nothing(tmp_path: Path) -> None:
    if not Path("/dev/fuse").exists():
        cannot("no /dev/fuse")
    with mount(THOR, tmp_path) as fs:
        (tmp_path / "run/moetuner").mkdir()
        (tmp_path / "run/moetuner/x").write_text("y")
        assert "Thor" in (tmp_path / "proc/device-tree/model").read_text()
        assert fs.path("device").resolve().name == "gpu-gpc-0"
        assert not fs.path("device/of_node").exists()
        pid = fs.pid
    assert list((tmp_path / "sys").iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.root
def test_the_product_on_the_mount(fresh: Mounted) -> None:
    """The real accessor against the file system, links and refusals included."""
    root = SysRoot(fresh.root)
    assert find(root).name == "17000000.gpu"
    gpu = Devfreq(root, "17000000.gpu")
    assert gpu.write_min(1020 * MHZ).cur_hz == 1020 * MHZ
    file = BaselineFile(root)
    file.save("17000000.gpu", 408 * MHZ, [1020 * MHZ])
    fresh.fail("min_freq", errno.EIO)
    assert recover(root, file).outcome is Outcome.FAILED
    fresh.fail("min_freq", None)
    assert recover(root, file).outcome is Outcome.RESTORED
    assert number(fresh.path("min_freq")) == 408 * MHZ
    assert Throttle(root).read() is None
    fresh.set(ALERT, "1\n")
    assert Throttle(root).read() == "gpu-throttle-alert 1 of 1"
    fresh.vanish()
    with pytest.raises(NodeGone):
        gpu.write_min(1020 * MHZ)
    assert find(root).name is None
    fresh.appear()
    assert gpu.read().min_hz == 306 * MHZ
