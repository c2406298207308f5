"""Carries out what the floor decides, on the board's devfreq node."""

from __future__ import annotations

from collections.abc import Container, Iterator

from moetuner.board.baseline import BaselineFile, Outcome, recover
from moetuner.board.devfreq import CLASS, Devfreq, NodeGone, find
from moetuner.board.sysroot import SysRoot
from moetuner.errors import SystemRefused
from moetuner.floor import mhz
from moetuner.floor_events import (
    Action,
    ClearBaseline,
    Event,
    Failed,
    Gone,
    Read,
    Release,
    RestoreMin,
    SaveBaseline,
    Say,
    Seen,
    WriteMin,
    Written,
)
from moetuner.log import INFO, NOTICE, WARNING, Log


class Actuator:
    """Between `floor.settle` and the files. It has no opinion and keeps no clock."""

    def __init__(
        self, root: SysRoot, baseline: BaselineFile, log: Log, configured: str | None = None
    ) -> None:
        self.configured = configured  # may change; the next `look` follows
        self._root = root
        self._baseline = baseline
        self._log = log
        self._node: Devfreq | None = None
        self._told = ""

    @property
    def node(self) -> str | None:
        """The name of the node in use."""
        return self._node.name if self._node else None

    def look(self, removed: Container[str] = ()) -> Iterator[Event]:
        """What changed about the node, for `settle`: settle each event before the next.

        For the start, for each devfreq hotplug event (`removed`: names that went away,
        even if they are back), after `configured` changed, and now and then in case an
        event was lost. A node that appears first gets back what an earlier run left
        raised; while that fails it is not used.
        """
        finding = find(self._root, self.configured)
        if self._node and self._node.name in removed:
            yield self._lost(f"{self._node.name} was removed")
        if self._node and self._node.name != finding.name:
            if self._root.exists(f"{CLASS}/{self._node.name}"):
                yield Release(f"another node is used: {finding.why}")
            yield self._lost(finding.why)
        if finding.name is None:
            self._tell(f"no GPU to raise: {finding.why}", NOTICE)
        elif self._node is None:
            yield from self._attach(finding.name, finding.why)

    def carry_out(self, action: Action) -> Event | None:
        """For `settle`: does it; the answer, if the floor wants one."""
        match action:
            case Say(text, priority):
                self._log(text, priority)
                return None
            case ClearBaseline():
                try:
                    self._baseline.clear()
                except SystemRefused as error:
                    # Harmless: what it says is no longer in place, and that is checked.
                    self._log(str(error), WARNING)
                return None
        if self._node is None:
            return Gone("no node")
        try:
            match action:
                case SaveBaseline(node, found_hz, ours_hz):
                    self._baseline.save(node, found_hz, ours_hz)
                    return None
                case Read():
                    return Seen(self._node.read())
                case WriteMin(_, hz):
                    return Written(self._node.write_min(hz))
                case RestoreMin(_, hz):
                    return Written(self._node.restore_min(hz))
        except NodeGone as error:
            self._log(f"{error.message}: waiting for it", NOTICE)
            return self._lost(error.message)
        except SystemRefused as error:
            return Failed(action, error.message)

    def _attach(self, name: str, why: str) -> Iterator[Event]:
        recovery = recover(self._root, self._baseline)
        if recovery.text:
            self._tell(recovery.text, recovery.priority)
        if recovery.outcome is Outcome.FAILED:
            return
        node = Devfreq(self._root, name)
        try:
            seen = node.read()
        except SystemRefused as error:
            self._tell(f"{name} cannot be used: {error.message}", WARNING)
            return
        self._node = node
        highest = f"{mhz(seen.available[0])} to {mhz(seen.available[-1])}" if seen.available else ""
        self._tell(f"GPU {why}" + (f" ({highest})" if highest else ""), INFO)
        self._told = ""
        yield Seen(seen)

    def _lost(self, why: str) -> Gone:
        self._node = None
        return Gone(why)

    def _tell(self, text: str, priority: int) -> None:
        """Each rescan finds the same again: say it once."""
        if text != self._told:
            self._log(text, priority)
        self._told = text
