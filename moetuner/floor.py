"""PURE: when the GPU's floor (devfreq `min_freq`) goes up, and what is put back.

`step(state, event, now)` returns the next state and the actions to carry out, in
order. The caller answers Read with Seen, WriteMin and RestoreMin with Written; an
action that fails is answered with Failed (or Gone) and ends the list, so nothing is
written that SaveBaseline has not put on disk before. `settle` does just that.
Times are monotonic seconds, frequencies Hz.

Other people write min_freq and max_freq too (nvpmodel, jetson_clocks, a person), and
devfreq keeps one value for all: the last writer wins. So what is found is compared
with what we wrote before each decision, and where it differs, theirs stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from moetuner.floor_events import (
    Action,
    Actions,
    ClearBaseline,
    Configure,
    Demand,
    Event,
    Failed,
    Gone,
    Policy,
    Read,
    Reading,
    Release,
    RestoreMin,
    SaveBaseline,
    Say,
    Seen,
    Stop,
    Throttling,
    Tick,
    Touched,
    WriteMin,
    Written,
)
from moetuner.log import INFO, NOTICE, WARNING

CHECK_S = 1.0  # while there is demand: look at the node and at throttling this often
SETTLE_S = 0.25  # a mode change writes several files: look when it is over
COOL_S = 10.0  # a board at its trip point would flap: rise again only this long after
RETRY_S = 10.0  # a floor that could not be put back is tried again after this long


@dataclass(frozen=True)
class Held:
    """Our value stands in place of `found_hz`; `reads_hz` None: not confirmed yet."""

    found_hz: int
    asked_hz: int
    reads_hz: int | None = None

    @property
    def values(self) -> tuple[int, ...]:
        """What min_freq may read while it is ours (Hz)."""
        return tuple(sorted({self.asked_hz, self.reads_hz or self.asked_hz}))


@dataclass(frozen=True)
class State:
    policy: Policy = field(default_factory=Policy)
    node: str | None = None
    who: str | None = None  # None: no demand
    held: Held | None = None
    putting_back: str | None = None  # why the write that is under way puts back
    hands_off: str | None = None  # why nothing is raised until this activity ends
    touched: bool = False  # somebody else wrote min_freq since it was ours
    throttled: str | None = None
    throttled_at: float | None = None  # when throttling was last reported
    stopping: bool = False
    # What this activity saw last: a difference is somebody else's write.
    max_hz: int | None = None
    enough_hz: int | None = None  # the min_freq that made raising needless
    check_at: float | None = None
    said: tuple[tuple[str, str], ...] = ()  # last text of each kind that is said once


def deadline(state: State) -> float | None:
    """When a Throttling and a Tick are wanted; None: only events matter."""
    return None if state.node is None or state.stopping else state.check_at


def raised_hz(state: State) -> int | None:
    """min_freq as it reads while it is ours (Hz); None: the floor is not raised."""
    return state.held.reads_hz if state.held else None


def obstacle(state: State, now: float) -> str | None:
    """Why demand is not, or would not be, answered with a raised floor; None: nothing."""
    if state.stopping:
        return "stopping"
    if state.node is None:
        return "no GPU node"
    return state.hands_off or _throttling(state, now)


def in_place(ours: Iterable[int], min_hz: int, max_hz: int) -> bool:
    """Whether min_freq holds one of our values.

    The kernel shows a min_freq above max_freq as max_freq, and remembers it.
    """
    return any(min_hz == hz or hz > max_hz == min_hz for hz in ours)


def sane(found_hz: int, seen: Reading) -> int:
    """What to write to put `found_hz` back: not above max_freq, unless that is itself below
    everything the node supports."""
    return min(found_hz, max(seen.max_hz, seen.available[0] if seen.available else 0))


def mhz(hz: int) -> str:
    """`1020 MHz`, `1300.5 MHz`"""
    return f"{hz / 1e6:.1f}".removesuffix(".0") + " MHz"


def settle(
    state: State, event: Event, now: float, carry_out: Callable[[Action], Event | None]
) -> State:
    """Steps until no event is left. `carry_out` returns an action's answer, or None."""
    events = deque((event,))
    while events:
        state, actions = step(state, events.popleft(), now)
        for action in actions:
            answer = carry_out(action)
            if answer is not None:
                events.append(answer)
                if isinstance(answer, Failed | Gone):
                    break
    return state


def step(state: State, event: Event, now: float) -> tuple[State, Actions]:
    """The next state, and what to do now, in this order."""
    match event:
        case Seen(reading):
            if state.node != reading.node:
                state = replace(_forgotten(state), node=reading.node)
            return _decide(state, reading, now)
        case Written(reading):
            return _written(state, reading, now)
        case Demand(active, who):
            return _demand(state, who if active else None, now)
        case Tick():
            if state.check_at is None or now < state.check_at:
                return state, ()
            return _look(state)
        case Throttling(why):
            return _throttle(state, why, now)
        case Touched(min_freq):
            if state.held is None and (state.who is None or state.hands_off):
                return state, ()
            touched = state.touched or (min_freq and state.held is not None)
            soon = now + SETTLE_S
            check_at = soon if state.check_at is None else min(state.check_at, soon)
            return replace(state, touched=touched, check_at=check_at), ()
        case Failed(action, why):
            return _failed(state, action, why, now)
        case Gone():
            return _forgotten(state), ()
        case Configure(policy):
            # A new policy is a new chance for what the old one said or ruled out.
            state = replace(state, policy=policy, enough_hz=None)
            return _look(_may_say_again(state, "rounded"))
        case Release(why):
            return _look(replace(state, hands_off=why))
        case Stop():
            return _look(replace(state, stopping=True))


def _look(state: State) -> tuple[State, Actions]:
    """A fresh reading, if there is anything to decide."""
    needed = state.node is not None and (state.who is not None or state.held is not None)
    return (state, (Read(),)) if needed else (replace(state, check_at=None), ())


def _forgotten(state: State) -> State:
    """Without the node: demand stays, everything seen of it goes."""
    return replace(
        state,
        node=None,
        held=None,
        putting_back=None,
        hands_off=None,
        touched=False,
        max_hz=None,
        enough_hz=None,
        check_at=None,
    )


def _demand(state: State, who: str | None, now: float) -> tuple[State, Actions]:
    if (who is None) == (state.who is None):
        return replace(state, who=who), ()
    state = replace(state, who=who, hands_off=None, enough_hz=None)
    if who is not None:
        state = replace(state, max_hz=None)
    if who is not None and state.throttled and state.held is None and state.node:
        # What was told may be long past: have it looked at before deciding.
        return replace(state, check_at=now), ()
    return _look(state)


def _throttle(state: State, why: str | None, now: float) -> tuple[State, Actions]:
    before = obstacle(state, now)
    state = replace(state, throttled=why, throttled_at=now if why else state.throttled_at)
    if obstacle(state, now) and not before and state.held:
        return _look(state)
    return state, ()


def _throttling(state: State, now: float) -> str | None:
    if not state.policy.yield_to_throttling:
        return None
    if state.throttled:
        return f"throttling: {state.throttled}"
    if state.throttled_at is not None and now < state.throttled_at + COOL_S:
        return "throttling until just now"
    return None


def _decide(state: State, seen: Reading, now: float) -> tuple[State, Actions]:
    """Compares what is there with what is wanted."""
    held, max_before = state.held, state.max_hz
    if state.who is None and held is None:
        return replace(state, check_at=None), ()
    state = replace(state, check_at=now + CHECK_S, max_hz=seen.max_hz)
    if held:
        ours = in_place(held.values, seen.min_hz, seen.max_hz)
        if not ours and held.reads_hz is None:  # the write that failed changed nothing
            state = replace(state, held=None, touched=False, check_at=None)
            return state, (ClearBaseline(seen.node),)
        if not ours or state.touched:
            return _theirs(state, seen, max_before)
    elif state.enough_hz is not None and seen.min_hz < min(state.enough_hz, seen.max_hz):
        return _theirs(state, seen, max_before)

    blocked = obstacle(state, now)
    wanted = state.who is not None and blocked is None
    target = _target(state.policy, seen) if wanted else None
    said: Actions = ()
    if max_before not in (None, seen.max_hz):
        said = (Say(f"max_freq is now {mhz(seen.max_hz)} (nvpmodel, heat or a person)", NOTICE),)
    if held and (target is None or target <= held.found_hz):
        why = "idle" if state.who is None and not state.stopping else blocked
        state = replace(state, putting_back=why or "nothing to raise")
        actions: Actions = (RestoreMin(seen.node, sane(held.found_hz, seen)),)
    elif target is None:
        state, actions = _not_raised(state, seen, blocked)
    elif held and target == held.asked_hz:
        actions = ()
    elif held is None and seen.min_hz >= target:
        text = f"min_freq is {mhz(seen.min_hz)} already: nothing to raise"
        state, actions = _once(replace(state, enough_hz=seen.min_hz), "enough", text)
    else:
        state, actions = _raise(state, seen, target)
    return state, said + actions


def _theirs(state: State, seen: Reading, max_before: int | None) -> tuple[State, Actions]:
    """Somebody else wrote min_freq: that stands, and what we found is void."""
    what = f"min_freq {mhz(seen.min_hz)}"
    if max_before not in (None, seen.max_hz):
        what += f" and max_freq {mhz(seen.max_hz)}"
    until = " until the next activity" if state.who is not None else ""
    text = f"somebody else (nvpmodel, jetson_clocks, a person) set {what}: left alone{until}"
    clear = (ClearBaseline(seen.node),) if state.held else ()
    state = replace(
        state,
        held=None,
        touched=False,
        enough_hz=None,
        check_at=None,
        hands_off=f"somebody else set {what}" if state.who is not None else None,
    )
    return state, (*clear, Say(text, NOTICE))


def _target(policy: Policy, seen: Reading) -> int | None:
    allowed = [hz for hz in seen.available if hz <= seen.max_hz]
    if not allowed:
        return None
    wanted = policy.frequency_hz
    return allowed[-1] if wanted is None else min(_supported(wanted, seen), allowed[-1])


def _supported(wanted_hz: int, seen: Reading) -> int:
    return next((hz for hz in seen.available if hz >= wanted_hz), seen.available[-1])


def _not_raised(state: State, seen: Reading, blocked: str | None) -> tuple[State, Actions]:
    if state.hands_off or state.stopping:  # said when it happened, and nothing to look for
        return replace(state, check_at=None), ()
    if blocked:
        return _once(state, "blocked", f"floor not raised: {blocked}", kind_only=True)
    text = f"{seen.node} supports no frequency up to its max_freq, {mhz(seen.max_hz)}"
    return _once(state, "blocked", text, WARNING)


def _raise(state: State, seen: Reading, target: int) -> tuple[State, Actions]:
    held = state.held
    said: Actions = ()
    wanted = state.policy.frequency_hz
    if wanted is not None and (supported := _supported(wanted, seen)) != wanted:
        text = f"{mhz(wanted)} is not supported by {seen.node}: {mhz(supported)} is used"
        state, said = _once(state, "rounded", text, NOTICE)
    if held is None:
        held = Held(found_hz=seen.min_hz, asked_hz=target)
        ours: tuple[int, ...] = held.values
    else:
        # Until it is confirmed, the value before may be the one in place.
        ours = tuple(sorted({*held.values, target}))
        held = replace(held, asked_hz=target)
    state = replace(state, held=held, enough_hz=None)
    save = SaveBaseline(seen.node, held.found_hz, ours)
    return state, (*said, save, WriteMin(seen.node, target))


def _written(state: State, seen: Reading, now: float) -> tuple[State, Actions]:
    held, why = state.held, state.putting_back
    if held is None:
        return state, ()
    if why is not None:
        return _was_put_back(replace(state, putting_back=None), held, seen, why, now)
    asked, got = held.asked_hz, seen.min_hz
    if asked > seen.max_hz:  # max_freq fell in between
        return _decide(replace(state, held=replace(held, reads_hz=asked)), seen, now)
    state = replace(state, held=replace(held, reads_hz=got))
    save = SaveBaseline(seen.node, held.found_hz, tuple(sorted({asked, got})))
    # The value before is in place no longer: from now on it would be somebody else's.
    taken: Actions = (save,) if held.reads_hz not in (None, asked) else ()
    if got != asked:
        if got == held.found_hz:
            text = f"min_freq still reads {mhz(got)} after writing {mhz(asked)}"
            state = replace(state, held=None, hands_off=text, check_at=None)
            state, said = _once(state, "failed", text, WARNING)
            return state, (ClearBaseline(seen.node), *said)
        text = f"min_freq reads {mhz(got)} after writing {mhz(asked)}: taken as it is"
        state, said = _once(state, "clamped", text, WARNING)
        taken = (*said, save)
    state = _may_say_again(state, "blocked", "failed")
    return state, (*taken, Say(f"floor {mhz(got)} ({state.who})"))


def _was_put_back(
    state: State, held: Held, seen: Reading, why: str, now: float
) -> tuple[State, Actions]:
    asked, got = sane(held.found_hz, seen), seen.min_hz
    if got != min(asked, seen.max_hz) and in_place(held.values, got, seen.max_hz):
        text = f"min_freq still reads {mhz(got)} after putting back {mhz(asked)}"
        return _once(replace(state, check_at=now + RETRY_S), "failed", text, WARNING)
    check_at = now + CHECK_S if state.who is not None and not state.hands_off else None
    state = replace(state, held=None, touched=False, check_at=check_at)
    said = Say(f"floor {mhz(got)} ({why})")
    state = _may_say_again(state, "failed")
    if state.who is not None:  # why it is not raised has been said herewith
        state, _ = _once(state, "blocked", said.text)
    return state, (ClearBaseline(seen.node), said)


def _failed(state: State, action: Action, why: str, now: float) -> tuple[State, Actions]:
    state, said = _once(state, "failed", why, WARNING)
    match action:
        case SaveBaseline() | WriteMin():
            state, look = _look(replace(state, hands_off=why))
            return state, said + look
        case RestoreMin():
            return replace(state, putting_back=None, check_at=now + RETRY_S), said
        case Read() if state.held:
            return replace(state, check_at=now + RETRY_S), said
        case Read():
            return replace(state, hands_off=why, check_at=None), said
    return state, said


def _once(
    state: State, kind: str, text: str, priority: int = INFO, *, kind_only: bool = False
) -> tuple[State, Actions]:
    """Says `text` unless it was the last of its kind (`kind_only`: unless one was said)."""
    last = dict(state.said)
    if kind in last and (kind_only or last[kind] == text):
        return state, ()
    last[kind] = text
    return replace(state, said=tuple(last.items())), (Say(text, priority),)


def _may_say_again(state: State, *kinds: str) -> State:
    return replace(state, said=tuple(item for item in state.said if item[0] not in kinds))
