"""The simulated board: what is in the tree, and that its governor follows the floor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetuner.demo import board as boards
from moetuner.demo.writes import Writes
from moetuner.errors import SystemRefused
from moetuner.inotify import IN_MODIFY

MHZ = 1_000_000


def test_the_node_is_found_as_on_the_real_board(simulated_board: boards.Board) -> None:
    link = simulated_board.root / "sys/class/devfreq/17000000.gpu"
    assert link.is_symlink() and not os.readlink(link).startswith("/")
    assert (link / "device/of_node/name").read_text() == "gpu\0"
    assert (link / "governor").read_text() == "nvhost_podgov\n"
    frequencies = (link / "available_frequencies").read_text().split()
    assert frequencies[0] == "306000000" and frequencies[-1] == "1020000000"
    assert len(frequencies) == 8
    assert "Orin Nano" in (simulated_board.root / "proc/device-tree/model").read_text()
    assert (simulated_board.root / "etc/nv_tegra_release").read_text().startswith("# R36")
    assert (simulated_board.root / "sys/class/hwmon/hwmon1/in1_label").read_text() == "VDD_IN\n"
    assert (simulated_board.root / "run").is_dir()


def test_the_tree_can_be_moved(simulated_board: boards.Board, tmp_path: Path) -> None:
    moved = simulated_board.root.rename(tmp_path / "elsewhere")
    assert (moved / "sys/class/devfreq/17000000.gpu/device/load").read_text() == "0\n"


@pytest.mark.parametrize(
    ("floor", "ceiling", "clock"),
    [
        (306, 1020, 306),
        (0, 1020, 306),
        (700, 1020, 714),
        (1020, 1020, 1020),
        (2000, 1020, 1020),
        (1020, 612, 612),  # the ceiling wins
        (1020, 0, 1020),  # no ceiling
        (306, 100, 306),
    ],
)
def test_the_clock_follows_the_limits(floor: int, ceiling: int, clock: int) -> None:
    assert boards.clock(floor * MHZ, ceiling * MHZ) == clock * MHZ


def test_power_is_what_was_measured_at_both_ends() -> None:
    assert boards.power_mw(306 * MHZ) == 8050
    assert boards.power_mw(1020 * MHZ) == 9630
    assert 8050 < boards.power_mw(612 * MHZ) < 9630


def test_the_governor_follows_and_ends_on_sigterm(tmp_path: Path) -> None:
    board = boards.Board(tmp_path / "board")
    governor = subprocess.Popen(
        [sys.executable, "-m", "moetuner.demo.board", str(board.root)],
        cwd=Path(boards.__file__).parents[2],
    )
    try:
        _await_text(board.power / "curr1_input", "1610")
        board.min_freq.write_text("700000000\n")
        _await_text(board.cur_freq, "714000000")
        board.max_freq.write_text("612000000\n")
        _await_text(board.cur_freq, "612000000")
        board.min_freq.write_text("306000000\n")
        _await_text(board.cur_freq, "306000000")
    finally:
        governor.send_signal(signal.SIGTERM)
    assert governor.wait(10) == 0


def _await_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    seen = ""
    while time.monotonic() < deadline:
        seen = path.read_text().strip() if path.exists() else "no such file"
        if seen == text:
            return
        time.sleep(0.01)
    pytest.fail(f"{path} holds {seen!r}, not {text!r}")


def test_written_files_are_named_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.touch()
    two.touch()
    writes = Writes()
    writes.watch(one)
    writes.watch(two, IN_MODIFY)
    assert writes.wait(0) == []
    one.write_text("a")
    one.write_text("b")
    two.write_text("c")
    assert writes.wait(5) == [one, two]
    assert writes.wait(0) == []
    with pytest.raises(SystemRefused, match=r"cannot watch .*three: No such file"):
        writes.watch(tmp_path / "three")
    writes.close()
