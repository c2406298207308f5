"""Who infers, from recorded event streams. Run alone: ./run-tests unit -k activity"""

from __future__ import annotations

import pytest

from moetuner.activity import (
    MAX_CALL_S,
    MAX_STALL_S,
    Activity,
    Call,
    Ended,
    Event,
    Sample,
    set_hold,
    step,
)


def play(*events: tuple[float, Event], hold: float = 1.0) -> list[str]:
    """`time who` after each event that changed who is wanted: a golden log."""
    activity = Activity(hold)
    log: list[str] = []
    who = ""
    for now, event in events:
        activity = step(activity, event, now)
        if activity.who != who:
            who = activity.who
            log.append(f"{now:g} {who or 'nobody'}")
    return log


def quiet(pid: int, last: float) -> Sample:
    return Sample(pid, last, None, False)


def inside(pid: int, last: float, since: float, progress: bool = True) -> Sample:
    return Sample(pid, last, since, progress)


def test_one_request() -> None:
    assert play(
        (10.0, Call(7, "llama-server", 10.0)),
        (11.0, quiet(7, 10.9)),  # tokens came meanwhile, seen only now
        (11.9, quiet(7, 10.9)),
    ) == ["10 pid 7 llama-server inference", "11.9 nobody"]


def test_two_servers_are_held_by_the_one_that_goes_on() -> None:
    assert play(
        (1.0, Call(7, "a", 1.0)),
        (1.5, Call(8, "b", 1.5)),
        (2.0, quiet(7, 1.0)),
        (2.5, quiet(8, 2.4)),
        (3.4, quiet(8, 2.4)),
    ) == [
        "1 pid 7 a inference",
        "1.5 pid 7 a inference and 1 more",
        "2 pid 8 b inference",
        "3.4 nobody",
    ]


def test_a_long_call_is_held_while_it_makes_progress() -> None:
    events: list[tuple[float, Event]] = [(0.0, Call(7, "a", 0.0))]
    events += [(float(t), inside(7, 0.0, 0.0)) for t in range(1, 121)]
    events += [(121.0, quiet(7, 120.5)), (121.5, quiet(7, 120.5))]
    assert play(*events) == ["0 pid 7 a inference", "121.5 nobody"]


def test_an_unwound_call_of_an_idle_process_is_let_go() -> None:
    events: list[tuple[float, Event]] = [(0.0, Call(7, "a", 0.0))]
    events += [(float(t), inside(7, 0.0, 0.0, progress=False)) for t in range(1, 60)]
    assert play(*events) == ["0 pid 7 a inference", f"{1 + MAX_STALL_S:g} nobody"]


def test_a_stall_is_forgiven_by_progress() -> None:
    events: list[tuple[float, Event]] = [(0.0, Call(7, "a", 0.0))]
    for t in range(1, 40):
        events.append((float(t), inside(7, 0.0, 0.0, progress=t % 5 == 0)))
    assert play(*events) == ["0 pid 7 a inference"]


def test_a_call_that_never_returns_is_let_go_although_its_process_is_busy() -> None:
    events: list[tuple[float, Event]] = [(0.0, Call(7, "a", 0.0))]
    events += [(float(t), inside(7, 0.0, 0.0)) for t in range(1, int(MAX_CALL_S) + 3)]
    assert play(*events) == ["0 pid 7 a inference", f"{MAX_CALL_S + 1:g} nobody"]


def test_a_dead_process_holds_nothing() -> None:
    assert play((0.0, Call(7, "a", 0.0)), (0.2, Ended(7))) == ["0 pid 7 a inference", "0.2 nobody"]


def test_a_reused_pid_is_another_process() -> None:
    assert play((0.0, Call(7, "old", 0.0)), (0.5, Ended(7)), (0.6, Call(7, "new", 0.6))) == [
        "0 pid 7 old inference",
        "0.5 nobody",
        "0.6 pid 7 new inference",
    ]


def test_a_process_that_the_probe_forgot_is_let_go_after_its_hold() -> None:
    assert play((0.0, Call(7, "a", 0.0)), (1.0, Sample(7, None, None, False))) == [
        "0 pid 7 a inference",
        "1 nobody",
    ]


def test_events_of_unknown_processes_change_nothing() -> None:
    assert play((0.0, Ended(7)), (0.1, quiet(8, 0.0)), (0.2, inside(9, 0.0, 0.0))) == []


def test_a_record_that_is_read_late_is_looked_at_at_once() -> None:
    activity = step(Activity(1.0), Call(7, "a", 0.0), 30.0)
    assert activity.due(30.0) == (7,)
    assert step(activity, inside(7, 0.0, 0.0), 30.0).who
    assert not step(activity, quiet(7, 0.1), 30.0).who


def test_a_record_from_the_future_counts_as_now() -> None:
    assert step(Activity(1.0), Call(7, "a", 99.0), 10.0).deadline == 11.0


@pytest.mark.parametrize("tokens_per_s", [2, 100])
def test_one_sample_a_hold_time_whatever_the_token_rate(tokens_per_s: int) -> None:
    activity = step(Activity(1.0), Call(7, "a", 0.0), 0.0)
    samples = 0
    for n in range(1, 60 * tokens_per_s):
        now = n / tokens_per_s
        for pid in activity.due(now):
            samples += 1
            activity = step(activity, quiet(pid, now - 0.001), now)
    assert activity.who
    assert samples <= 60


def test_a_new_hold_time_is_applied_at_the_next_sample() -> None:
    activity = step(Activity(60.0), Call(7, "a", 0.0), 0.0)
    activity = set_hold(activity, 0.5, 10.0)
    assert activity.due(10.0) == (7,)
    assert not step(activity, quiet(7, 0.0), 10.0).who
