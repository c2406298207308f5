"""The floor's decisions, on a devfreq that behaves as the kernel's. No mount, no waiting.

A node that comes and goes, writes that fail, the end: test_floor_faults.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moetuner.floor import CHECK_S, COOL_S, deadline, in_place, mhz, obstacle, raised_hz
from moetuner.floor_events import (
    Policy,
    Throttling,
)
from tests.support.boards import AGX_ORIN_JP5, ALL, MHZ, Board
from tests.support.floor_rig import WHO, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.said()
    return rig


RAISED = f"floor 1020 MHz ({WHO})"


def test_raises_while_there_is_demand_and_puts_back_what_it_found(rig: Rig) -> None:
    rig.demand()
    assert rig.min_mhz == 1020
    assert raised_hz(rig.state) == 1020 * MHZ
    rig.advance(100)
    rig.demand(False)
    assert rig.min_mhz == 306
    assert rig.did() == [
        "SaveBaseline 306 for 1020",
        "WriteMin 1020",
        f"Say {RAISED}",
        "RestoreMin 306",
        "ClearBaseline",
        "Say floor 306 MHz (idle)",
    ]
    assert not rig.saved()
    assert rig.written() == [1020, 306]


def test_the_log_is_two_lines_an_activity(rig: Rig) -> None:
    for _ in range(3):
        rig.demand()
        rig.advance(30)
        rig.demand(False)
        rig.advance(30)
    assert rig.said() == [RAISED, "floor 306 MHz (idle)"] * 3


def test_the_baseline_is_on_disk_before_the_write(rig: Rig) -> None:
    rig.demand()
    kinds = [line.split()[0] for line in rig.did()]
    assert kinds.index("SaveBaseline") < kinds.index("WriteMin")
    saved = rig.baseline.load()
    assert saved is not None
    assert (saved.node, saved.found_hz, saved.ours_hz) == (
        "17000000.gpu",
        306 * MHZ,
        (1020 * MHZ,),
    )


def test_another_process_takes_over_without_a_word(rig: Rig) -> None:
    rig.demand()
    rig.demand(who="pid 7 llama-bench inference")
    rig.advance(10)
    assert rig.said() == [RAISED]
    assert rig.written() == [1020]


def test_puts_back_the_value_found_not_the_lowest(rig: Rig) -> None:
    rig.others_write("min_freq", 510)
    rig.demand()
    rig.demand(False)
    assert rig.min_mhz == 510
    assert rig.said()[-1] == "floor 510 MHz (idle)"


def test_puts_back_a_value_that_is_no_supported_frequency(rig: Rig) -> None:
    rig.others_write("min_freq", 612.001)
    rig.demand()
    rig.demand(False)
    assert rig.tree.kernel.min_hz == 612_001_000


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.key)
def test_each_board_goes_to_its_highest_and_back(tmp_path: Path, board: Board) -> None:
    rig = Rig(tmp_path, board)
    rig.demand()
    assert rig.tree.kernel.min_hz == board.gpu_node.frequencies[-1]
    rig.demand(False)
    assert rig.tree.kernel.min_hz == board.gpu_node.frequencies[0]


@pytest.mark.parametrize(
    ("hz", "text"),
    [
        (1_020_000_000, "1020 MHz"),
        (1_300_500_000, "1300.5 MHz"),
        (306_000_000, "306 MHz"),
        (76_800_000, "76.8 MHz"),
        (114_750_000, "114.8 MHz"),
        (100_000_000, "100 MHz"),
        (0, "0 MHz"),
    ],
)
def test_frequencies_in_the_log(hz: int, text: str) -> None:
    assert mhz(hz) == text


def test_a_half_megahertz_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path, AGX_ORIN_JP5)
    rig.said()
    rig.demand()
    assert rig.said() == [f"floor 1300.5 MHz ({WHO})"]


# -- which frequency --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured_mhz", "max_mhz", "expected", "rounded"),
    [
        (None, 1020, 1020, False),
        (None, 612, 612, False),
        (None, 700, 612, False),  # max_freq need not be a supported frequency
        (918, 1020, 918, False),
        (900, 1020, 918, True),
        (1, 1020, 306, True),
        (5000, 1020, 1020, True),
        (918, 612, 612, False),
        (900, 612, 612, True),
        (714, 700, 612, False),
    ],
)
def test_target(
    tmp_path: Path, configured_mhz: int | None, max_mhz: float, expected: float, rounded: bool
) -> None:
    policy = Policy(configured_mhz * MHZ if configured_mhz else None)
    rig = Rig(tmp_path, policy=policy)
    rig.others_write("max_freq", max_mhz)
    rig.said()
    rig.demand()
    assert rig.min_mhz == expected
    assert any("is not supported by 17000000.gpu" in line for line in rig.said()) is (
        rounded and expected != 306  # at 306 there was nothing to raise, so nothing to round
    )


def test_rounding_is_said_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, policy=Policy(900 * MHZ))
    rig.said()
    for _ in range(3):
        rig.demand()
        rig.demand(False)
    assert rig.said() == [
        "900 MHz is not supported by 17000000.gpu: 918 MHz is used",
        *[f"floor 918 MHz ({WHO})", "floor 306 MHz (idle)"] * 3,
    ]


def test_a_new_configuration_is_followed_while_held(rig: Rig) -> None:
    rig.demand()
    rig.configure(frequency_hz=510 * MHZ)
    assert rig.min_mhz == 510
    rig.configure(frequency_hz=None)
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 306
    assert rig.said() == [
        RAISED,
        f"floor 510 MHz ({WHO})",
        RAISED,
        "floor 306 MHz (idle)",
    ]


def test_a_configuration_below_what_was_found_puts_back(rig: Rig) -> None:
    rig.others_write("min_freq", 612)
    rig.demand()
    rig.configure(frequency_hz=510 * MHZ)
    assert rig.min_mhz == 612
    assert not rig.saved()
    rig.demand(False)
    assert rig.min_mhz == 612


def test_no_frequency_up_to_max_freq(rig: Rig) -> None:
    rig.others_write("max_freq", 100)
    rig.demand()
    rig.advance(5)
    assert rig.written() == []
    assert rig.said() == [
        "17000000.gpu supports no frequency up to its max_freq, 100 MHz",
    ]


# -- jetson_clocks, nvpmodel, a person ----------------------------------------------------


def test_locked_clocks_leave_nothing_to_do(rig: Rig) -> None:
    rig.jetson_clocks()
    for _ in range(3):
        rig.demand()
        rig.advance(5)
        rig.demand(False)
    assert rig.written() == [1020]
    assert rig.said() == ["min_freq is 1020 MHz already: nothing to raise"]
    assert not rig.saved()


def test_a_min_above_our_target_is_never_lowered(tmp_path: Path) -> None:
    rig = Rig(tmp_path, policy=Policy(510 * MHZ))
    rig.others_write("min_freq", 918)
    rig.demand()
    rig.demand(False)
    assert rig.written() == [918]


@pytest.mark.parametrize("notice", [False, True], ids=["seen at a tick", "told at once"])
def test_a_write_to_min_freq_is_said_once_and_stands(rig: Rig, notice: bool) -> None:
    rig.demand()
    rig.others_write("min_freq", 714, notice=notice)
    rig.advance(10)
    assert rig.min_mhz == 714
    assert not rig.saved()
    assert deadline(rig.state) is None
    rig.demand(False)
    assert rig.min_mhz == 714
    assert rig.written() == [1020, 714]
    assert rig.said() == [
        RAISED,
        "somebody else (nvpmodel, jetson_clocks, a person) set min_freq 714 MHz: "
        "left alone until the next activity",
    ]
    rig.demand()  # the next one starts from what is there
    rig.demand(False)
    assert rig.written() == [1020, 714, 1020, 714]


def test_a_write_between_the_last_tick_and_the_end(rig: Rig) -> None:
    rig.demand()
    rig.advance(CHECK_S * 2)
    rig.others_write("min_freq", 408)
    rig.demand(False)
    assert rig.min_mhz == 408
    assert rig.said()[-1] == (
        "somebody else (nvpmodel, jetson_clocks, a person) set min_freq 408 MHz: left alone"
    )


def test_jetson_clocks_writes_the_very_value_that_is_ours(rig: Rig) -> None:
    """Only that somebody wrote tells it from ours; their lock must outlive our hold."""
    rig.demand()
    rig.others_write("min_freq", 1020, notice=True)
    rig.demand(False)
    assert rig.min_mhz == 1020
    assert not rig.saved()


def test_nvpmodel_changes_the_mode_while_held(rig: Rig) -> None:
    """Case 15: noticed, logged once, respected, and what is restored is sane."""
    rig.demand()
    rig.nvpmodel(612)
    rig.advance(10)
    rig.demand(False)
    assert rig.min_mhz == 306
    assert rig.written() == [1020, 0]
    assert rig.said() == [
        RAISED,
        "somebody else (nvpmodel, jetson_clocks, a person) set min_freq 306 MHz and "
        "max_freq 612 MHz: left alone until the next activity",
    ]
    rig.demand()
    assert rig.said() == [f"floor 612 MHz ({WHO})"]
    rig.demand(False)
    assert rig.min_mhz == 306


def test_a_mode_change_is_not_answered_between_its_two_writes(rig: Rig) -> None:
    rig.demand()
    rig.others_write("max_freq", 612, notice=True)
    rig.advance(0.01)
    rig.others_write("min_freq", 0, notice=True)
    rig.advance(10)
    rig.demand(False)
    assert rig.written() == [1020, 0]
    assert rig.min_mhz == 306


def test_max_freq_falls_and_rises_while_held(rig: Rig) -> None:
    rig.demand()
    rig.others_write("max_freq", 612)
    assert rig.min_mhz == 612  # clamped; the kernel remembers 1020
    rig.advance(2)
    rig.others_write("max_freq", 918)
    assert rig.min_mhz == 612  # not the remembered value: it was written anew
    rig.advance(2)
    assert rig.min_mhz == 918
    rig.others_write("max_freq", 0)
    rig.advance(2)
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 306
    assert rig.said() == [
        RAISED,
        "max_freq is now 612 MHz (nvpmodel, heat or a person)",
        f"floor 612 MHz ({WHO})",
        "max_freq is now 918 MHz (nvpmodel, heat or a person)",
        f"floor 918 MHz ({WHO})",
        "max_freq is now 1020 MHz (nvpmodel, heat or a person)",
        RAISED,
        "floor 306 MHz (idle)",
    ]


def test_max_freq_falls_just_before_the_end(rig: Rig) -> None:
    """The clamped value is ours, though it is not what was written."""
    rig.demand()
    rig.others_write("max_freq", 612)
    rig.demand(False)
    assert rig.min_mhz == 306
    rig.others_write("max_freq", 0)
    assert rig.min_mhz == 306  # nothing of ours is remembered


def test_max_freq_falls_below_what_was_found(rig: Rig) -> None:
    rig.others_write("min_freq", 612)
    rig.demand()
    rig.others_write("max_freq", 408)
    rig.advance(2)
    assert rig.written()[-1] == 408  # never above max_freq
    rig.demand(False)
    assert rig.min_mhz == 408
    assert not rig.saved()
    rig.others_write("max_freq", 0)
    assert rig.min_mhz == 408  # and nothing of ours comes back


def test_max_freq_falls_below_everything_supported(rig: Rig) -> None:
    rig.demand()
    rig.others_write("max_freq", 100)
    rig.advance(CHECK_S)
    assert not rig.saved()
    rig.demand(False)
    rig.others_write("max_freq", 0)
    assert rig.min_mhz == 306
    assert rig.written() == [1020, 306]


def test_a_value_of_ours_that_was_replaced_is_nobody_s(rig: Rig) -> None:
    """If we are killed now and somebody sets what was ours before, that is theirs."""
    rig.demand()
    rig.others_write("max_freq", 612)
    rig.advance(2)
    rig.others_write("max_freq", 0)
    rig.advance(2)
    rig.others_write("min_freq", 612)
    rig.start()
    assert rig.min_mhz == 612


def test_what_was_read_while_clamped_is_not_what_is_saved(rig: Rig) -> None:
    """min 816 under a max of 510 reads 510; once max rises, 816 is what was there."""
    rig.others_write("min_freq", 816)
    rig.others_write("max_freq", 510)
    rig.demand()
    rig.advance(2)
    rig.others_write("max_freq", 0)
    rig.advance(2)
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 816


def test_somebody_lowers_min_while_it_was_high_enough(rig: Rig) -> None:
    rig.jetson_clocks()
    rig.demand()
    rig.others_write("min_freq", 408)
    rig.advance(10)
    assert rig.min_mhz == 408
    assert rig.written() == [1020, 408]


def test_max_freq_rises_while_min_was_high_enough(rig: Rig) -> None:
    rig.others_write("max_freq", 612)
    rig.jetson_clocks()
    rig.demand()
    rig.others_write("max_freq", 0)
    rig.advance(2)
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 612


@pytest.mark.parametrize("late_max", [408, 306])
def test_max_freq_falls_between_reading_and_writing(rig: Rig, late_max: int) -> None:
    kernel = rig.tree.kernel
    write = kernel.write

    def slow(attribute: str, text: str) -> None:
        kernel.write = write  # type: ignore[method-assign]
        kernel.write("max_freq", str(late_max * MHZ))
        kernel.write(attribute, text)

    kernel.write = slow  # type: ignore[method-assign]
    rig.demand()
    assert rig.min_mhz == late_max
    assert rig.said().count(f"floor 408 MHz ({WHO})") == (late_max == 408)
    rig.others_write("max_freq", 0)
    assert rig.min_mhz == late_max  # what was written first is not remembered
    rig.demand(False)
    assert rig.min_mhz == 306
    assert not rig.saved()


# -- heat ---------------------------------------------------------------------------------


def test_throttling_takes_the_floor_away_and_gives_it_back_later(rig: Rig) -> None:
    rig.demand()
    rig.throttling = "gpu-throttle-alert 1 of 2"
    rig.advance(CHECK_S)
    assert rig.min_mhz == 306
    rig.throttling = "gpu-throttle-alert 2 of 2"
    rig.advance(60)
    rig.throttling = None
    rig.advance(COOL_S - 2)
    assert rig.min_mhz == 306
    rig.advance(4)
    assert rig.min_mhz == 1020
    assert rig.said() == [
        RAISED,
        "floor 306 MHz (throttling: gpu-throttle-alert 1 of 2)",
        RAISED,
    ]


def test_a_board_at_its_trip_point_does_not_flap(rig: Rig) -> None:
    rig.demand()
    for _ in range(30):
        rig.throttling = "gpu-thermal 99.0 °C"
        rig.advance(1)
        rig.throttling = None
        rig.advance(1)
    assert rig.written() == [1020, 306]


def test_activity_that_begins_hot_is_told_once(rig: Rig) -> None:
    rig.throttling = "gpu-throttle-alert 1 of 2"
    rig.feed(Throttling(rig.throttling))  # nothing was raised yet
    for _ in range(3):
        rig.demand()
        rig.advance(5)
        rig.demand(False)
        rig.advance(5)
    assert rig.written() == []
    assert rig.said() == ["floor not raised: throttling: gpu-throttle-alert 1 of 2"]
    assert obstacle(rig.state, rig.now) == "throttling: gpu-throttle-alert 1 of 2"


def test_heat_that_lasts_over_many_activities_is_told_once(rig: Rig) -> None:
    rig.demand()
    rig.throttling = "gpu-throttle-alert 1 of 2"
    rig.advance(5)
    for _ in range(3):
        rig.demand(False)
        rig.advance(5)
        rig.demand()
        rig.advance(5)
    assert rig.written() == [1020, 306]
    assert rig.said() == [RAISED, "floor 306 MHz (throttling: gpu-throttle-alert 1 of 2)"]


def test_throttling_of_long_ago_does_not_delay(rig: Rig) -> None:
    """Nobody asks while idle, so what was told last is looked at again first."""
    rig.demand()
    rig.throttling = "gpu-thermal 99.0 °C"
    rig.advance(1)
    rig.demand(False)
    rig.throttling = None
    rig.advance(3600)
    rig.demand()
    assert rig.min_mhz == 1020


def test_throttling_can_be_left_to_the_kernel(rig: Rig) -> None:
    rig.configure(yield_to_throttling=False)
    rig.demand()
    rig.throttling = "gpu-throttle-alert 1 of 2"
    rig.advance(5)
    assert rig.min_mhz == 1020


def test_a_write_by_others_is_respected_when_heat_ends(rig: Rig) -> None:
    rig.demand()
    rig.throttling = "gpu-thermal 99.0 °C"
    rig.advance(1)
    rig.others_write("min_freq", 510)
    rig.throttling = None
    rig.advance(COOL_S + 2)
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 510  # found anew when it rose again


@pytest.mark.parametrize(
    ("ours", "min_mhz", "max_mhz", "expected"),
    [
        ((1020,), 1020, 1020, True),
        ((1020,), 306, 1020, False),
        ((1020,), 612, 612, True),  # clamped
        ((1020,), 612, 1020, False),
        ((1020,), 306, 612, False),
        ((612, 1020), 612, 1020, True),
        ((), 306, 1020, False),
    ],
)
def test_in_place(ours: tuple[int, ...], min_mhz: int, max_mhz: int, expected: bool) -> None:
    assert in_place(ours, min_mhz, max_mhz) is expected
