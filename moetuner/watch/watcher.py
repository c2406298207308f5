"""The watching half in one piece, for the daemon and for `--check`."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from dataclasses import dataclass

from moetuner.config import WatchConfig
from moetuner.log import Log
from moetuner.watch import layout
from moetuner.watch.callers import Callers, Look
from moetuner.watch.discovery import Discovery
from moetuner.watch.kernel import UprobePmu
from moetuner.watch.libraries import Libraries
from moetuner.watch.mappings import Mappings
from moetuner.watch.processes import Process, ProcFs
from moetuner.watch.program import Program, load


@dataclass(frozen=True)
class Counters:
    """What the probe counted since it was loaded (probes/inference.h)."""

    wakeups: int
    lost: int
    unmatched: int
    unwound: int


@dataclass(frozen=True)
class Report:
    """What the watcher tells, and asks, its owner."""

    judge: Callable[[Process], tuple[bool, str]]
    on_call: Callable[[int, str, float], None]
    on_end: Callable[[int], None]
    on_change: Callable[[], None]


class Watcher:
    """Raises MissingRequirement or SystemRefused when this machine cannot be watched.

    Registers its descriptors with `selector`; each key's data is a function to call.
    """

    def __init__(
        self,
        config: WatchConfig,
        report: Report,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        pmu = UprobePmu.find()
        with contextlib.ExitStack() as undo:
            self.program: Program = load()
            undo.callback(self.program.close)
            mappings = Mappings()
            undo.callback(mappings.close)
            proc = ProcFs()
            self.callers = Callers(
                self.program, proc, selector, report.judge, report.on_call, report.on_end, log
            )
            undo.callback(self.callers.close)
            self.libraries = Libraries(
                self.program, pmu, selector, config.returns, log, report.on_change
            )
            undo.callback(self.libraries.close)
            self._mappings = mappings
            self._discovery = Discovery(self.libraries, mappings, proc, selector, clock, log)
            undo.pop_all()
        self._discovery.configure(config.libraries, config.rescan_s)

    def configure(self, config: WatchConfig) -> None:
        self._discovery.configure(config.libraries, config.rescan_s)
        self.libraries.set_returns(config.returns)

    def set_hold(self, hold_s: float) -> None:
        """The owner lets go after `hold_s` of silence; the kernel wakes it again after half."""
        self.program.set_rearm(hold_s / 2)

    @property
    def deadline(self) -> float:
        return self._discovery.deadline

    def tick(self) -> None:
        self._discovery.tick()

    def cpus_changed(self) -> None:
        """To be called when a processor went on- or offline (a uevent of subsystem `cpu`)."""
        self._discovery.cpus_changed()

    def look(self, pid: int, quiet_since: float) -> Look:
        return self.callers.look(pid, quiet_since)

    def counters(self) -> Counters:
        read = self.program.counter
        return Counters(
            wakeups=read(layout.COUNTER_WAKEUPS),
            lost=read(layout.COUNTER_LOST),
            unmatched=read(layout.COUNTER_UNMATCHED),
            unwound=read(layout.COUNTER_UNWOUND),
        )

    @property
    def mappings_lost(self) -> int:
        return self._mappings.lost

    def close(self) -> None:
        """Detaches everything; the probed programs run on as if nothing had been there."""
        self.libraries.close()
        self._discovery.close()
        self.callers.close()
        self.program.close()
