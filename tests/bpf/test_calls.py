"""Calls are counted one by one, whatever their shape, and wake nobody."""

from __future__ import annotations

import pytest

from tests.bpf.harness import Driver, Rig
from tests.bpf.natives import FUNCTIONS, total

pytestmark = pytest.mark.root


@pytest.mark.parametrize("function", FUNCTIONS)
def test_23_calls(rig: Rig, driver: Driver, function: str) -> None:
    assert driver.ask(f"call {function} 23") == str(total(function, 23))
    assert rig.count(driver.pid) == 23
    assert not rig.in_flight(driver.pid)


def test_only_the_first_call_wakes(rig: Rig, driver: Driver) -> None:
    rig.watcher.set_hold(1000)  # the pauses of a slow machine are no silence
    before = rig.watcher.counters()
    for function in FUNCTIONS:
        driver.ask(f"call {function} 1000")
    after = rig.watcher.counters()
    rig.watcher.set_hold(1)
    assert rig.count(driver.pid) == 4000
    assert rig.told(driver.pid) == 1
    assert after.wakeups - before.wakeups == 1
    assert (after.lost, after.unmatched, after.unwound) == (
        before.lost,
        before.unmatched,
        before.unwound,
    )


def test_a_call_after_silence_wakes_again(rig: Rig, driver: Driver) -> None:
    driver.ask("call decode 1")
    assert rig.told(driver.pid) == 1
    rig.watcher.set_hold(0)
    driver.ask("call decode 1")
    rig.watcher.set_hold(1)
    assert rig.told(driver.pid) == 2


def test_nested(rig: Rig, driver: Driver) -> None:
    driver.ask("nest decode synchronize 23")
    assert rig.count(driver.pid) == 46
    assert not rig.in_flight(driver.pid)


def test_recursion(rig: Rig, driver: Driver) -> None:
    driver.ask("recurse process 23")
    assert rig.count(driver.pid) == 23
    assert not rig.in_flight(driver.pid)


def test_the_outermost_call_counts(rig: Rig, driver: Driver) -> None:
    driver.ask("inside decode")
    driver.ask("recurse decode 2")
    assert rig.in_flight(driver.pid), "only the inner ones have returned"
    driver.ask("return")
    assert not rig.in_flight(driver.pid)


def test_threads(rig: Rig, driver: Driver) -> None:
    driver.ask("threads 8 decode 23")
    assert rig.count(driver.pid) == 8 * 23
    assert not rig.in_flight(driver.pid)


def test_inside(rig: Rig, driver: Driver) -> None:
    driver.ask("inside decode")
    rig.until(lambda: rig.calls and rig.calls[-1][0] == driver.pid, "the call is told")
    assert rig.in_flight(driver.pid)
    assert driver.ask("call synchronize 1") == "2"
    assert rig.in_flight(driver.pid), "the outer call goes on"
    assert driver.ask("return") == "returned"
    assert not rig.in_flight(driver.pid)
