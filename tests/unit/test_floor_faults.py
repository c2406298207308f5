"""The floor when the node comes and goes, when reads and writes fail, and at the end."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moetuner.floor import CHECK_S, RETRY_S, deadline, obstacle
from moetuner.floor_events import Gone, Release, Seen, Tick, Touched
from tests.support.boards import MHZ, NANO, THOR
from tests.support.floor_rig import WHO, Rig

RAISED = f"floor 1020 MHz ({WHO})"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.said()
    return rig


# -- the node -----------------------------------------------------------------------------


def test_a_node_that_appears_during_demand_is_raised(tmp_path: Path) -> None:
    """Case 11: the service started before the node existed."""
    rig = Rig(tmp_path)
    rig.tree.vanish()
    rig.said()
    rig.start()
    rig.demand()
    rig.advance(60)
    assert rig.did() == []
    rig.tree.appear()
    rig.look()
    assert rig.min_mhz == 1020
    said = rig.said()
    assert said[0].startswith("no GPU to raise: no GPU among the devfreq devices yet")
    assert said[1].startswith("GPU 17000000.gpu: ")
    assert said[2:] == [RAISED]


def test_a_node_that_vanishes_while_held_is_waited_for(rig: Rig) -> None:
    rig.demand()
    rig.tree.vanish()
    rig.advance(CHECK_S)
    assert rig.state.node is None
    assert rig.saved()  # until it is known what min_freq is when it comes back
    rig.tree.appear()
    rig.look()
    assert rig.min_mhz == 1020
    rig.demand(False)
    assert rig.min_mhz == 306
    assert not rig.saved()


def test_a_node_that_comes_back_with_our_value_in_place(rig: Rig) -> None:
    rig.demand()
    kernel = rig.tree.kernel
    rig.tree.vanish()
    rig.advance(CHECK_S)
    rig.demand(False)
    rig.tree.appear()
    rig.tree.devices["17000000.gpu"] = kernel
    assert rig.min_mhz == 1020
    rig.look()
    assert rig.min_mhz == 306
    assert not rig.saved()


def test_a_node_that_was_replaced_between_two_looks(rig: Rig) -> None:
    rig.demand()
    rig.tree.vanish()
    rig.tree.appear()
    rig.look(("17000000.gpu",))
    assert rig.min_mhz == 1020
    assert not any("somebody else" in line for line in rig.said())


def test_another_node_is_used_after_the_first_is_put_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, THOR)
    rig.demand()
    rig.actuator.configured = "gpu-nvd-0"
    rig.look()
    assert rig.tree.devices["gpu-gpc-0"].min_hz == 54 * MHZ
    assert rig.tree.devices["gpu-nvd-0"].min_hz == 1692 * MHZ
    assert rig.said()[2:] == [
        "floor 54 MHz (another node is used: gpu-nvd-0: the configuration names it)",
        "GPU gpu-nvd-0: the configuration names it (54 MHz to 1692 MHz)",
        f"floor 1692 MHz ({WHO})",
    ]
    rig.demand(False)
    assert rig.tree.devices["gpu-nvd-0"].min_hz == 54 * MHZ


# -- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EACCES, errno.EINVAL, errno.EIO])
def test_a_write_that_fails_is_said_once_and_retried_with_the_next_activity(
    rig: Rig, error: int
) -> None:
    rig.tree.kernel.faults["min_freq"] = error
    for _ in range(3):
        rig.demand()
        rig.advance(30)
        rig.demand(False)
    attempts = [w for w in rig.tree.kernel.writes if w.attribute == "min_freq"]
    assert len(attempts) == 3
    [line] = rig.said()
    assert line.startswith("cannot write 1020000000 to ")
    assert "min_freq" in line
    assert not rig.saved()
    rig.tree.kernel.faults.clear()
    rig.demand()
    assert rig.said() == [RAISED]


def test_a_put_back_that_fails_is_tried_again(rig: Rig) -> None:
    rig.demand()
    rig.said()
    rig.tree.kernel.faults["min_freq"] = errno.EIO
    rig.demand(False)
    rig.advance(RETRY_S * 3)
    assert rig.min_mhz == 1020
    assert rig.saved()
    assert len(rig.tree.kernel.writes) == 1 + 4
    rig.tree.kernel.faults.clear()
    rig.advance(RETRY_S)
    assert rig.min_mhz == 306
    assert not rig.saved()
    said = rig.said()
    assert len(said) == 2
    assert said[1] == "floor 306 MHz (idle)"


def test_a_driver_that_ignores_the_write(rig: Rig) -> None:
    rig.tree.kernel.write = lambda attribute, text: None  # type: ignore[method-assign]
    rig.demand()
    rig.advance(30)
    rig.demand(False)
    assert rig.said() == ["min_freq still reads 306 MHz after writing 1020 MHz"]
    assert not rig.saved()


def test_a_driver_that_takes_another_value(rig: Rig) -> None:
    """What reads back is ours, and is put back."""
    write = rig.tree.kernel.write

    def lower(attribute: str, text: str) -> None:
        write(attribute, str(min(int(text), 918 * MHZ)))

    rig.tree.kernel.write = lower  # type: ignore[method-assign]
    rig.demand()
    rig.advance(5)
    saved = rig.baseline.load()
    assert saved is not None
    assert set(saved.ours_hz) == {918 * MHZ, 1020 * MHZ}
    rig.demand(False)
    assert rig.min_mhz == 306
    assert rig.said() == [
        "min_freq reads 918 MHz after writing 1020 MHz: taken as it is",
        f"floor 918 MHz ({WHO})",
        "floor 306 MHz (idle)",
    ]


def test_nothing_is_raised_that_cannot_be_saved(rig: Rig) -> None:
    (rig.root.path("/run/moetuner")).write_text("in the way of the directory")
    for _ in range(2):
        rig.demand()
        rig.advance(30)
        rig.demand(False)
    assert rig.written() == []
    [line] = rig.said()
    assert line.startswith("cannot write ")
    assert "baseline.json" in line


def test_reading_fails_while_held(rig: Rig) -> None:
    rig.demand()
    rig.said()
    read = rig.tree.kernel.read

    def broken(attribute: str) -> str:
        raise OSError(errno.EIO, "Input/output error")

    rig.tree.kernel.read = broken  # type: ignore[method-assign]
    rig.advance(RETRY_S * 3)
    rig.demand(False)
    assert len(rig.said()) == 1
    rig.tree.kernel.read = read  # type: ignore[method-assign]
    rig.advance(RETRY_S)
    assert rig.min_mhz == 306


# -- the end, and waking up ----------------------------------------------------------------


def test_stop_puts_back_and_nothing_is_raised_after(rig: Rig) -> None:
    rig.demand()
    rig.stop()
    assert rig.min_mhz == 306
    assert not rig.saved()
    rig.demand(False)
    rig.demand()
    rig.advance(10)
    assert rig.min_mhz == 306
    assert rig.said() == [RAISED, "floor 306 MHz (stopping)"]


def test_a_new_daemon_puts_back_what_a_killed_one_left(rig: Rig) -> None:
    rig.demand()
    rig.said()
    rig.start()
    assert rig.min_mhz == 306
    assert not rig.saved()
    assert rig.said()[0].startswith("floor 306 MHz (left raised by process ")


def test_it_wakes_nobody_while_idle(rig: Rig) -> None:
    assert deadline(rig.state) is None
    rig.demand()
    assert deadline(rig.state) == rig.now + CHECK_S
    rig.demand(False)
    assert deadline(rig.state) is None


def test_ticks_that_nobody_asked_for_read_nothing(rig: Rig) -> None:
    rig.demand()
    rig.actions.clear()
    for _ in range(100):
        rig.feed(Tick())
    assert rig.actions == []
    rig.demand(False)
    rig.actions.clear()
    rig.feed(Tick())
    rig.feed(Touched(min_freq=True))
    assert rig.actions == []
    assert deadline(rig.state) is None


def test_obstacles(tmp_path: Path) -> None:
    rig = Rig(tmp_path, NANO)
    assert obstacle(rig.state, rig.now) is None
    rig.demand()
    rig.others_write("min_freq", 153.6)
    rig.advance(1)
    assert obstacle(rig.state, rig.now) == "somebody else set min_freq 153.6 MHz"
    rig.feed(Gone("unbound"))
    assert obstacle(rig.state, rig.now) == "no GPU node"
    rig.stop()
    assert obstacle(rig.state, rig.now) == "stopping"


def test_release_puts_back_until_the_next_node(rig: Rig) -> None:
    rig.demand()
    rig.feed(Release("another is used"))
    assert rig.min_mhz == 306
    rig.advance(10)
    assert rig.min_mhz == 306
    rig.feed(Gone("another is used"))
    reading = rig.actuator._node.read()  # type: ignore[union-attr]
    rig.feed(Seen(reading))
    assert rig.min_mhz == 1020
