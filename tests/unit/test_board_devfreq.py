"""Finding the GPU's node on every board, reading it, writing it."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from moetuner.board.devfreq import Devfreq, NodeGone, NotWritten, find
from moetuner.board.sysroot import SysRoot
from moetuner.errors import SystemRefused
from tests.support.boards import ALL, MHZ, ORIN_NANO_JP6, THOR, XAVIER, Board, Node
from tests.support.devfreqfs import BoardTree, TreeRoot


def board(*nodes: Node) -> Board:
    """An Orin with other devfreq devices."""
    return replace(ORIN_NANO_JP6, nodes=nodes)


def written(root: Path, *nodes: Node) -> SysRoot:
    board(*nodes).write(root)
    return SysRoot(root)


def node(name: str, of_name: str | None = None, compatible: str | None = None) -> Node:
    return Node(name, (306 * MHZ, 1020 * MHZ), of_name, compatible)


GPU = ORIN_NANO_JP6.gpu_node


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.key)
@pytest.mark.parametrize("kind", ["plain files", "tree"])
def test_each_board(tmp_path: Path, board: Board, kind: str) -> None:
    board.write(tmp_path)
    root = SysRoot(tmp_path) if kind == "plain files" else TreeRoot(BoardTree(board), tmp_path)
    finding = find(root)
    assert finding.name == board.gpu
    assert finding.why.startswith(f"{board.gpu}: ")
    reading = Devfreq(root, board.gpu).read()
    assert reading.available == board.gpu_node.frequencies
    assert (reading.min_hz, reading.max_hz) == (reading.available[0], reading.available[-1])


def test_thor_has_no_device_tree_name_and_may_idle_at_zero(tmp_path: Path) -> None:
    """Case 12."""
    THOR.write(tmp_path)
    root = SysRoot(tmp_path)
    finding = find(root)
    assert finding.name == "gpu-gpc-0"
    assert "not gpu-nvd-0" in finding.why
    assert Devfreq(root, "gpu-gpc-0").read().cur_hz == 0


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        # the device tree's name goes before the device's
        ((node("10000000.gpu"), node("20000000.ga10b", "ga10b")), "20000000.ga10b"),
        ((node("17000000.ga10b"),), "17000000.ga10b"),
        ((node("gpu-nvd-0"), node("gpu-gpc-1"), node("gpu-gpc-0")), "gpu-gpc-0"),
        ((node("odd-name", "gb10b"),), "odd-name"),
        # never: other engines, memory, buses, other firms' GPUs
        ((node("15340000.vic", "vic"), node("15480000.nvdec", "nvdec")), None),
        ((node("17000000.emc", "external-memory-controller"),), None),
        ((node("dmc"), node("soc:bus"), node("bwmgr")), None),
        ((node("fb000000.gpu", "gpu", "arm,mali-valhall-csf"),), None),
        ((node("5000000.gpu", "gpu", "qcom,adreno-635.0\0qcom,adreno"),), None),
        ((node("gpu-nvd-0"),), None),  # the one that matters may come later
        ((node("gpu-burn"), node("17000000.gpux"), node("xgpu")), None),
        ((), None),
    ],
)
def test_preference(tmp_path: Path, nodes: tuple[Node, ...], expected: str | None) -> None:
    finding = find(written(tmp_path, *nodes))
    assert finding.name == expected
    assert finding.why


def test_a_pci_gpu_of_another_firm(tmp_path: Path) -> None:
    root = written(tmp_path, node("gpu-gpc-0"))
    root.path("/sys/devices/platform/bus@0/gpu-gpc-0/vendor").write_text("0x1002\n")
    assert find(root).name is None
    root.path("/sys/devices/platform/bus@0/gpu-gpc-0/vendor").write_text("0x10de\n")
    assert find(root).name == "gpu-gpc-0"


@pytest.mark.parametrize(
    ("configured", "expected", "why"),
    [
        ("gpu-nvd-0", "gpu-nvd-0", "gpu-nvd-0: the configuration names it"),
        ("gpu-gpc-0", "gpu-gpc-0", "gpu-gpc-0: the configuration names it"),
        ("17000000.gpu", None, "17000000.gpu, which the configuration names, is not there (there:"),
        ("bwmgr", None, "bwmgr, which the configuration names, is not a GPU"),
    ],
)
def test_the_configuration_decides(
    tmp_path: Path, configured: str, expected: str | None, why: str
) -> None:
    THOR.write(tmp_path)
    finding = find(SysRoot(tmp_path), configured)
    assert finding.name == expected
    assert finding.why.startswith(why)


def test_no_devfreq_at_all(tmp_path: Path) -> None:
    finding = find(SysRoot(tmp_path))
    assert finding.name is None
    assert "no devfreq device" in finding.why


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    finding = find(written(tmp_path, *(node(f"bus{i}") for i in range(9))))
    assert "and 5 more" in finding.why


# -- reading and writing -------------------------------------------------------------------


@pytest.fixture
def tree() -> BoardTree:
    return BoardTree(ORIN_NANO_JP6)


@pytest.fixture
def gpu(tree: BoardTree, tmp_path: Path) -> Devfreq:
    return Devfreq(TreeRoot(tree, tmp_path), "17000000.gpu")


def test_read(gpu: Devfreq, tree: BoardTree) -> None:
    tree.kernel.write("max_freq", "612000000")
    reading = gpu.read()
    assert reading.node == "17000000.gpu"
    assert (reading.min_hz, reading.max_hz, reading.cur_hz) == (306 * MHZ, 612 * MHZ, 306 * MHZ)
    assert gpu.governor() == "nvhost_podgov"


def test_write_returns_what_reads_back(gpu: Devfreq, tree: BoardTree) -> None:
    assert gpu.write_min(918 * MHZ).min_hz == 918 * MHZ
    tree.kernel.write("max_freq", "612000000")
    assert gpu.write_min(1020 * MHZ).min_hz == 612 * MHZ


@pytest.mark.parametrize("hz", [0, 1, 700 * MHZ, 2000 * MHZ, 1020, -306 * MHZ])
def test_only_supported_frequencies_are_written(gpu: Devfreq, tree: BoardTree, hz: int) -> None:
    with pytest.raises(NotWritten, match=r"17000000\.gpu does not support"):
        gpu.write_min(hz)
    assert tree.kernel.writes == []


@pytest.mark.parametrize("hz", [306 * MHZ, 612_001_000, 1020 * MHZ])
def test_any_value_in_range_is_put_back(gpu: Devfreq, hz: int) -> None:
    assert gpu.restore_min(hz).min_hz == hz


@pytest.mark.parametrize("hz", [0, 100 * MHZ, 1021 * MHZ, -1])
def test_nothing_out_of_range_is_put_back(gpu: Devfreq, tree: BoardTree, hz: int) -> None:
    with pytest.raises(NotWritten, match="out of"):
        gpu.restore_min(hz)
    assert tree.kernel.writes == []


def test_the_error_names_path_value_and_reason(gpu: Devfreq, tree: BoardTree) -> None:
    tree.kernel.faults["min_freq"] = errno.EACCES
    with pytest.raises(SystemRefused) as caught:
        gpu.write_min(1020 * MHZ)
    assert not isinstance(caught.value, NodeGone)
    assert "1020000000" in caught.value.message
    assert "/sys/class/devfreq/17000000.gpu/min_freq: Permission denied" in caught.value.message


@pytest.mark.parametrize("attribute", ["min_freq", "max_freq", "available_frequencies"])
def test_a_node_that_loses_an_attribute_is_gone(
    gpu: Devfreq, tree: BoardTree, attribute: str
) -> None:
    del tree.files[f"{tree.gpu.directory}/{attribute}"]
    with pytest.raises(NodeGone):
        gpu.read()


def test_a_node_that_vanishes_between_two_calls(gpu: Devfreq, tree: BoardTree) -> None:
    gpu.read()
    tree.vanish()
    for call in (gpu.read, lambda: gpu.write_min(1020 * MHZ), lambda: gpu.restore_min(306 * MHZ)):
        with pytest.raises(NodeGone):
            call()


@pytest.mark.parametrize("error", [errno.ENODEV, errno.ENXIO])
def test_a_node_that_goes_while_it_is_written(gpu: Devfreq, tree: BoardTree, error: int) -> None:
    tree.kernel.faults["min_freq"] = error
    with pytest.raises(NodeGone):
        gpu.write_min(1020 * MHZ)


def test_a_clock_that_is_not_told_is_none(tmp_path: Path) -> None:
    root = written(tmp_path, GPU)
    root.path(f"{GPU.directory}/cur_freq").unlink()
    assert Devfreq(root, GPU.name).read().cur_hz is None


@pytest.mark.parametrize(
    ("attribute", "text"),
    [("min_freq", "<unsupported>"), ("max_freq", ""), ("available_frequencies", "306000000 n/a")],
)
def test_what_is_no_frequency_is_named(tmp_path: Path, attribute: str, text: str) -> None:
    XAVIER.write(tmp_path)
    root = SysRoot(tmp_path)
    root.path(f"{XAVIER.gpu_node.directory}/{attribute}").write_text(text + "\n")
    with pytest.raises(SystemRefused, match=attribute) as caught:
        Devfreq(root, XAVIER.gpu).read()
    assert not isinstance(caught.value, NodeGone)


def test_a_node_without_frequencies_takes_none(tmp_path: Path) -> None:
    root = written(tmp_path, GPU)
    root.path(f"{GPU.directory}/available_frequencies").write_text("\n")
    gpu = Devfreq(root, GPU.name)
    assert gpu.read().available == ()
    with pytest.raises(NotWritten):
        gpu.restore_min(306 * MHZ)


def test_a_missing_attribute_is_not_created(tmp_path: Path) -> None:
    root = written(tmp_path, GPU)
    gpu = Devfreq(root, GPU.name)
    gpu.read()
    path = root.path(f"{GPU.directory}/min_freq")
    path.unlink()
    with pytest.raises(NodeGone):
        gpu.write_min(1020 * MHZ)
    assert not path.exists()
