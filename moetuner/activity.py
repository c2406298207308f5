"""Who infers: from what the probe saw to one demand. Pure; the caller gives the time.

A process is wanted from its first call on, while a call is in flight, and until `hold`
seconds after its last one ended. The kernel reports only transitions, so between them
the caller samples a process when `deadline` says so, which is once per hold time while
tokens flow, and feeds what it found back in.

Times are seconds of CLOCK_MONOTONIC, the probe's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# A single call that lasts longer than this without any other sign of life is taken for
# one that will never return. The longest honest call, a 512-token batch read from an SD
# card at 20 MB/s, takes about five minutes.
MAX_CALL_S = 600.0
# In flight, but the process used no processor time and waits for no disk: idle, its call
# was left by an unwinding exception or hangs. Waiting for the GPU costs processor time.
MAX_STALL_S = 10.0


@dataclass(frozen=True)
class Call:
    """The probe's record of a transition: a call began at `at`."""

    pid: int
    name: str
    at: float


@dataclass(frozen=True)
class Sample:
    """What a process looked like when it was sampled.

    last: time of its last entry or return, None if the probe knows nothing of it.
    in_flight: entry time of its oldest call that has not returned and whose thread
    lives, None if there is none. progress: it used processor time or waits for disk
    since the sample before.
    """

    pid: int
    last: float | None
    in_flight: float | None
    progress: bool


@dataclass(frozen=True)
class Ended:
    """The process is gone (or runs another program now)."""

    pid: int


@dataclass(frozen=True)
class Active:
    """A process that is wanted. `due`: when to sample it next."""

    pid: int
    name: str
    last: float
    due: float
    stalled_since: float | None = None


@dataclass(frozen=True)
class Activity:
    """All processes that are wanted now, in the order they became so."""

    hold: float
    active: tuple[Active, ...] = ()

    @property
    def deadline(self) -> float | None:
        """When the next sample is due; None while nobody infers."""
        return min((a.due for a in self.active), default=None)

    def due(self, now: float) -> tuple[int, ...]:
        """Pids to sample now."""
        return tuple(a.pid for a in self.active if a.due <= now)

    @property
    def who(self) -> str:
        """`pid 2213 llama-server inference`; of several, the first and how many more."""
        if not self.active:
            return ""
        first = self.active[0]
        others = len(self.active) - 1
        more = f" and {others} more" if others else ""
        return f"pid {first.pid} {first.name} inference{more}"


Event = Call | Sample | Ended


def step(activity: Activity, event: Event, now: float) -> Activity:
    """The activity after `event`. An event about an unknown process changes nothing,
    except a Call, which makes it wanted."""
    if isinstance(event, Call):
        return _called(activity, event, now)
    known = next((a for a in activity.active if a.pid == event.pid), None)
    if known is None:
        return activity
    if isinstance(event, Ended):
        return _without(activity, event.pid)
    return _sampled(activity, known, event, now)


def set_hold(activity: Activity, hold: float, now: float) -> Activity:
    """Another hold time: everyone wanted is sampled at once to decide anew."""
    return Activity(hold, tuple(replace(a, due=now) for a in activity.active))


def _called(activity: Activity, call: Call, now: float) -> Activity:
    last = min(call.at, now)  # a record can be no younger than its reading
    known = next((a for a in activity.active if a.pid == call.pid), None)
    if known is not None:
        last = max(last, known.last)
        return _with(
            activity, replace(known, last=last, due=last + activity.hold, stalled_since=None)
        )
    if last + activity.hold <= now:
        # Read late (the daemon was stopped): the call may still run, so look at once.
        return _with(activity, Active(call.pid, call.name, last, now))
    return _with(activity, Active(call.pid, call.name, last, last + activity.hold))


def _sampled(activity: Activity, known: Active, sample: Sample, now: float) -> Activity:
    last = known.last if sample.last is None else max(known.last, min(sample.last, now))
    if last + activity.hold > now:
        return _with(
            activity, replace(known, last=last, due=last + activity.hold, stalled_since=None)
        )
    if sample.in_flight is None or now - sample.in_flight > MAX_CALL_S:
        return _without(activity, known.pid)
    stalled = None if sample.progress else (known.stalled_since or now)
    if stalled is not None and now - stalled >= MAX_STALL_S:
        return _without(activity, known.pid)
    # A long call: look again after a hold time; its return moves `last` then.
    return _with(
        activity, replace(known, last=last, due=now + activity.hold, stalled_since=stalled)
    )


def _with(activity: Activity, changed: Active) -> Activity:
    if any(a.pid == changed.pid for a in activity.active):
        active = tuple(changed if a.pid == changed.pid else a for a in activity.active)
    else:
        active = (*activity.active, changed)
    return replace(activity, active=active)


def _without(activity: Activity, pid: int) -> Activity:
    return replace(activity, active=tuple(a for a in activity.active if a.pid != pid))
