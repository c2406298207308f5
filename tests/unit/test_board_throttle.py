"""Which signs of heat count, on each board."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetuner.board.sysroot import SysRoot
from moetuner.board.throttle import Throttle
from tests.support.boards import AGX_ORIN_JP5, ALL, NANO, ORIN_NANO_JP6, THOR, XAVIER, Board


class Thermal:
    """A board whose heat the test sets."""

    def __init__(self, directory: Path, board: Board) -> None:
        board.write(directory)
        self.board = board
        self.class_ = directory / "sys/class/thermal"
        self.throttle = Throttle(SysRoot(directory))

    def cool(self, kind: str, state: int) -> None:
        index = [cooler.type for cooler in self.board.coolers].index(kind)
        (self.class_ / f"cooling_device{index}/cur_state").write_text(f"{state}\n")

    def zone(self, kind: str) -> Path:
        return self.class_ / f"thermal_zone{[z.type for z in self.board.zones].index(kind)}"

    def heat(self, kind: str, temp_mc: int) -> None:
        (self.zone(kind) / "temp").write_text(f"{temp_mc}\n")


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.key)
def test_a_board_at_work_with_its_fan_on_does_not_throttle(tmp_path: Path, board: Board) -> None:
    assert Throttle(SysRoot(tmp_path)).read() is None
    assert Thermal(tmp_path, board).throttle.read() is None


@pytest.mark.parametrize(
    ("board", "kind", "state", "text"),
    [
        (ORIN_NANO_JP6, "gpu-throttle-alert", 1, "gpu-throttle-alert 1 of 1"),
        (ORIN_NANO_JP6, "cpu-throttle-alert", 1, "cpu-throttle-alert 1 of 1"),
        (ORIN_NANO_JP6, "cv0-throttle-alert", 1, "cv0-throttle-alert 1 of 1"),
        (ORIN_NANO_JP6, "soc0-throttle-alert", 1, "soc0-throttle-alert 1 of 1"),
        (ORIN_NANO_JP6, "devfreq-17000000.gpu", 3, "devfreq-17000000.gpu 3 of 7"),
        (AGX_ORIN_JP5, "devfreq-17000000.ga10b", 1, "devfreq-17000000.ga10b 1 of 7"),
        (THOR, "gpu-throttle-alert", 2, "gpu-throttle-alert 2 of 2"),
        (THOR, "soc012-throttle-alert", 1, "soc012-throttle-alert 1 of 2"),
        (THOR, "devfreq-gpu-gpc-0", 18, "devfreq-gpu-gpc-0 18 of 169"),
        (XAVIER, "gpu-throttle-alert", 1, "gpu-throttle-alert 1 of 1"),
        (NANO, "gpu-balanced", 1, "gpu-balanced 1 of 1"),
        # these are no throttling of what the floor heats
        (ORIN_NANO_JP6, "hot-surface-alert", 1, None),
        (ORIN_NANO_JP6, "pwm-fan", 4, None),
        (ORIN_NANO_JP6, "cpufreq-cpu0", 5, None),
        (NANO, "pwm-fan", 10, None),
    ],
)
def test_cooling_devices(
    tmp_path: Path, board: Board, kind: str, state: int, text: str | None
) -> None:
    thermal = Thermal(tmp_path, board)
    assert thermal.throttle.read() is None
    thermal.cool(kind, state)
    assert thermal.throttle.read() == text
    thermal.cool(kind, 0)
    assert thermal.throttle.read() is None


@pytest.mark.parametrize(
    ("board", "kind", "temp_mc", "text"),
    [
        (ORIN_NANO_JP6, "gpu-thermal", 98_999, None),
        (ORIN_NANO_JP6, "gpu-thermal", 99_000, "gpu-thermal 99.0 °C"),
        (ORIN_NANO_JP6, "gpu-thermal", 72_000, None),  # 70 °C is hot-surface-alert's
        (ORIN_NANO_JP6, "cpu-thermal", 99_500, None),  # its alert would tell
        (ORIN_NANO_JP6, "tj-thermal", 75_000, None),  # the fan's
        (THOR, "gpu-thermal", 109_500, "gpu-thermal 109.5 °C"),
        (XAVIER, "GPU-therm", 95_500, "GPU-therm 95.5 °C"),
        (NANO, "GPU-therm", 95_499, None),
    ],
)
def test_zones(tmp_path: Path, board: Board, kind: str, temp_mc: int, text: str | None) -> None:
    thermal = Thermal(tmp_path, board)
    thermal.heat(kind, temp_mc)
    assert thermal.throttle.read() == text


def test_a_kernel_that_tells_no_bindings(tmp_path: Path) -> None:
    thermal = Thermal(tmp_path, NANO)
    for file in thermal.zone("GPU-therm").glob("cdev*"):
        file.unlink()
    thermal.heat("GPU-therm", 96_000)
    assert thermal.throttle.read() == "GPU-therm 96.0 °C"


def test_the_zone_of_a_gpu_that_sleeps_is_no_sign(tmp_path: Path) -> None:
    """It answers EAGAIN there; here it has nothing to read."""
    thermal = Thermal(tmp_path, ORIN_NANO_JP6)
    assert thermal.throttle.read() is None
    temp = thermal.zone("gpu-thermal") / "temp"
    temp.unlink()
    assert thermal.throttle.read() is None
    temp.write_text("\n")
    assert thermal.throttle.read() is None
    temp.write_text("99500\n")
    assert thermal.throttle.read() == "gpu-thermal 99.5 °C"


def test_devices_that_come_later_are_found(tmp_path: Path) -> None:
    throttle = Throttle(SysRoot(tmp_path))
    assert throttle.read() is None
    thermal = Thermal(tmp_path, ORIN_NANO_JP6)
    thermal.cool("gpu-throttle-alert", 1)
    assert throttle.read() == "gpu-throttle-alert 1 of 1"


class Counting(SysRoot):
    reads = 0

    def _load(self, path: Path) -> bytes:
        self.reads += 1
        return super()._load(path)


def test_it_is_cheap_after_the_first_time(tmp_path: Path) -> None:
    ORIN_NANO_JP6.write(tmp_path)
    root = Counting(tmp_path)
    throttle = Throttle(root)
    throttle.read()
    root.reads = 0
    throttle.read()
    # devfreq, four alerts, one zone
    assert root.reads == 6
