"""PURE: what the floor is told (events) and what it wants done (actions).

Frequencies are Hz.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetuner.log import INFO


@dataclass(frozen=True)
class Reading:
    """A devfreq node as it reads now; `available` ascending; `cur_hz` None: not told."""

    node: str
    min_hz: int
    max_hz: int
    cur_hz: int | None
    available: tuple[int, ...]


@dataclass(frozen=True)
class Policy:
    frequency_hz: int | None = None  # None: the highest that max_freq allows
    yield_to_throttling: bool = True


# -- events --------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """Inference that keeps experts on the CPU began, ended, or is another's (`who`)."""

    active: bool
    who: str = ""


@dataclass(frozen=True)
class Seen:
    """The node appeared, or the answer to Read."""

    reading: Reading


@dataclass(frozen=True)
class Gone:
    """The node is not there (any more).

    What we wrote is forgotten with it, its baseline file is not: whoever sees the node
    again recovers that before Seen.
    """

    why: str


@dataclass(frozen=True)
class Touched:
    """Somebody else wrote to min_freq (or only to max_freq), whatever the value."""

    min_freq: bool


@dataclass(frozen=True)
class Throttling:
    """Why the board throttles now; None: it does not. Wanted with each Tick."""

    why: str | None


@dataclass(frozen=True)
class Written:
    """The node as it reads after WriteMin or RestoreMin."""

    reading: Reading


@dataclass(frozen=True)
class Failed:
    """`action` could not be carried out, and the rest of its list was not."""

    action: Action
    why: str


@dataclass(frozen=True)
class Configure:
    policy: Policy


@dataclass(frozen=True)
class Tick:
    """The time of `deadline` has come; earlier ones do nothing."""


@dataclass(frozen=True)
class Release:
    """Put back now, before another node is used (Gone and Seen follow)."""

    why: str


@dataclass(frozen=True)
class Stop:
    """Put back and want nothing any more."""


Event = (
    Demand | Seen | Gone | Touched | Throttling | Written | Failed | Configure | Tick
    | Release | Stop
)  # fmt: skip

# -- actions -------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Answer with Seen."""


@dataclass(frozen=True)
class SaveBaseline:
    """To disk, synced: min_freq was `found_hz`; any of `ours_hz` in its place is ours."""

    node: str
    found_hz: int
    ours_hz: tuple[int, ...]


@dataclass(frozen=True)
class WriteMin:
    """Write a supported frequency. Answer with Written."""

    node: str
    hz: int


@dataclass(frozen=True)
class RestoreMin:
    """Write back what was found, which need not be a supported frequency. Answer: Written."""

    node: str
    hz: int


@dataclass(frozen=True)
class ClearBaseline:
    """Nothing of ours is in place any more."""

    node: str


@dataclass(frozen=True)
class Say:
    text: str
    priority: int = INFO


Action = Read | SaveBaseline | WriteMin | RestoreMin | ClearBaseline | Say
Actions = tuple[Action, ...]
