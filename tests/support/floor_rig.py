"""The floor on a fake board with a clock that the test advances: the pure decisions, the
real actuator and baseline file, and a devfreq that behaves as the kernel's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetuner.board.actuator import Actuator
from moetuner.board.baseline import BaselineFile
from moetuner.floor import State, deadline, settle
from moetuner.floor_events import (
    Action,
    Configure,
    Demand,
    Event,
    Policy,
    Say,
    Stop,
    Throttling,
    Tick,
    Touched,
)
from tests.support.boards import MHZ, ORIN_NANO_JP6, Board
from tests.support.devfreqfs import BoardTree, TreeRoot

WHO = "pid 2213 llama-server inference"


class Rig:
    """Plays the daemon. `lines` is its log, `actions` what the floor wanted done."""

    def __init__(
        self, directory: Path, board: Board = ORIN_NANO_JP6, policy: Policy | None = None
    ) -> None:
        self.now = 1000.0
        self.tree = BoardTree(board)
        self.root = TreeRoot(self.tree, directory)
        self.throttling: str | None = None
        self.policy = policy or Policy()
        self.actions: list[Action] = []
        self.lines: list[str] = []
        board.write(directory, sys=False)
        self.start()

    @property
    def min_mhz(self) -> float:
        return self.tree.kernel.min_hz / MHZ

    def saved(self) -> bool:
        """Whether a baseline is on disk."""
        return self.root.exists(self.baseline.path)

    def written(self) -> list[float]:
        """Each min_freq that was written, in MHz, by whomever."""
        return [int(w.text) / MHZ for w in self.tree.kernel.writes if w.attribute == "min_freq"]

    # -- the daemon -----------------------------------------------------------------

    def start(self) -> None:
        """A new daemon, as after a crash of the last: only files survive."""
        self.baseline = BaselineFile(self.root)
        self.actuator = Actuator(self.root, self.baseline, lambda m, p=6: self.lines.append(m))
        self.state = State(policy=self.policy)
        self.look()

    def feed(self, event: Event) -> None:
        self.state = settle(self.state, event, self.now, self._carry_out)

    def look(self, removed: tuple[str, ...] = ()) -> None:
        for event in self.actuator.look(removed):
            self.feed(event)

    def advance(self, seconds: float) -> None:
        """Time goes by; whenever the floor wants to look, it is told the board's state."""
        end = self.now + seconds
        while (due := deadline(self.state)) is not None and due <= end:
            self.now = max(self.now, due)
            self.feed(Throttling(self.throttling))
            self.feed(Tick())
        self.now = end

    def demand(self, active: bool = True, who: str = WHO) -> None:
        self.feed(Demand(active, who))
        self.advance(0)

    def configure(self, **values: object) -> None:
        self.policy = Policy(**values)  # type: ignore[arg-type]
        self.feed(Configure(self.policy))

    def stop(self) -> None:
        self.feed(Stop())

    # -- other people -----------------------------------------------------------------

    def others_write(self, attribute: str, mhz: float, *, notice: bool = False) -> None:
        self.tree.kernel.write(attribute, str(round(mhz * MHZ)))
        if notice:
            self.feed(Touched(attribute == "min_freq"))

    def nvpmodel(self, max_mhz: float) -> None:
        """A change of power mode."""
        self.others_write("max_freq", max_mhz)
        self.others_write("min_freq", 0)

    def jetson_clocks(self) -> None:
        self.others_write("min_freq", self.tree.kernel.max_hz / MHZ)

    # -- logs -------------------------------------------------------------------------

    def said(self) -> list[str]:
        """The log since the last call."""
        lines, self.lines[:] = list(self.lines), []
        return lines

    def did(self) -> list[str]:
        """The actions since the last call, one short line each; what was read is left out."""
        actions, self.actions[:] = list(self.actions), []
        return [short(action) for action in actions if short(action) != "Read"]

    def _carry_out(self, action: Action) -> Event | None:
        self.actions.append(action)
        return self.actuator.carry_out(action)


def short(action: Action) -> str:
    """`WriteMin 1020`, `SaveBaseline 306 for 1020`, `Say floor 1020 MHz (…)`"""
    name = type(action).__name__
    if isinstance(action, Say):
        return f"Say {action.text}"
    hz = getattr(action, "hz", None)
    if hz is not None:
        return f"{name} {hz / MHZ:g}"
    found, ours = getattr(action, "found_hz", None), getattr(action, "ours_hz", ())
    if found is not None:
        return f"{name} {found / MHZ:g} for {' '.join(f'{hz / MHZ:g}' for hz in ours)}"
    return name


# Path's own, because Python 3.10 binds os.rename and the like when it is imported.
CHANGING: tuple[tuple[Any, str], ...] = (
    (os, "open"),
    (os, "write"),
    (os, "fsync"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "mkdir"),
)


class Killed(BaseException):
    """What SIGKILL would do: no handler of ours catches it."""


@contextmanager
def killed_at(step: int, rig: Rig) -> Iterator[Callable[[], int]]:
    """Ends at the n-th system call that changes something, before it takes place, and for
    a write to devfreq also after. The value tells how many there were."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                tick()
                return real(*args, **kwargs)

            return call

        for owner, name in CHANGING:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        store = rig.root._store

        def _store(path: Path, data: bytes) -> None:
            tick()
            store(path, data)
            tick()

        patch.setattr(rig.root, "_store", _store)
        try:
            yield lambda: count
        except Killed:
            assert count == step
