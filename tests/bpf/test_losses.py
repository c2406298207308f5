"""Records that did not fit: counted, and made good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetuner.watch import mappings
from tests.bpf.conftest import Start
from tests.bpf.harness import HOLD_S, Driver, Rig, descriptors
from tests.bpf.natives import Natives, copy
from tests.support.machine import cannot

pytestmark = pytest.mark.root
sites = pytest.mark.parametrize("rig", ["sites"], indirect=True)
NEVER_S = 1000.0


def fill(rig: Rig, driver: Driver) -> None:
    """More processes' first calls than the ring buffer holds, while nobody reads it."""
    before = rig.watcher.counters().lost
    driver.ask("children 1500 decode")
    assert rig.watcher.counters().lost > before


@sites
def test_a_lost_first_call_is_told_with_the_next(
    rig: Rig, start: Start, driver: Driver, library: Path
) -> None:
    late = start()
    late.load(library)
    fill(rig, driver)
    late.ask("call decode 1")
    assert rig.told(late.pid) == 0
    late.ask("call decode 1")
    assert rig.told(late.pid) == 1
    assert rig.count(late.pid) == 2


@sites
def test_a_lost_wake_up_is_told_with_the_next(rig: Rig, start: Start, driver: Driver) -> None:
    """Tokens flow on without a pause, so that no silence would announce them."""
    driver.ask("call decode 1")
    told = rig.told(driver.pid)
    assert told == 1
    fill(rig, driver)
    rig.watcher.set_hold(0)
    driver.ask("call decode 1")  # announces itself, in vain
    rig.watcher.set_hold(NEVER_S)
    assert rig.told(driver.pid) == told
    driver.ask("call decode 1")
    assert rig.told(driver.pid) == told + 1
    driver.ask("call decode 100")
    assert rig.told(driver.pid) == told + 1
    rig.watcher.set_hold(HOLD_S)


def buffers() -> int:
    """Open descriptors of the sets of buffers."""
    return descriptors().count("anon_inode:[eventpoll]")


@sites
def test_lost_mappings_lead_to_a_scan(
    rig: Rig, natives: Natives, start: Start, small: Path
) -> None:
    driver, noise = start(), start()
    rig.settle()
    for _ in range(4):  # on whichever processor each runs
        start().ask(f"map 3000 {natives.driver}")
    driver.load(small)
    before = rig.watcher.mappings_lost
    rig.turn()
    # The kernel tells of the loss with the next record that fits.
    rig.until(
        lambda: noise.ask(f"map 1 {natives.driver}") and rig.watcher.mappings_lost > before,
        "the loss is counted",
    )
    rig.attached(small)
    assert driver.ask("call decode 23") == "2530"
    assert rig.count(driver.pid) == 23


def test_processors_come_and_go(
    natives: Natives, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when nvpmodel brings a board's other cores online."""
    if os.cpu_count() == 1:
        cannot("it has one processor")
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    for path in (first, second):
        copy(natives.small(), path)
    with monkeypatch.context() as patch:
        patch.setattr(mappings, "_online", lambda: {0})
        rig = Rig("sites")
    with rig:
        driver = start()
        rig.settle()
        os.sched_setaffinity(driver.pid, {1})
        driver.load(first)
        rig.settle()
        assert rig.state(first) == "unknown", "nobody listens to processor 1"
        rig.rescan()
        rig.attached(first)
        driver.load(second)
        rig.attached(second)
        before = buffers()
        rig.watcher.cpus_changed()
        rig.settle()
        assert buffers() == before
