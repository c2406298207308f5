"""Random lives of a board: inference, other people's writes, heat, faults, a node that goes
and comes, a daemon that is killed. A second devfreq, which only the other people write,
shows what the board would be like without us: that is what must be left behind.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moetuner.floor import RETRY_S, in_place
from moetuner.floor_events import Action, Touched, WriteMin
from tests.support.boards import MHZ, ORIN_NANO_JP6
from tests.support.floor_rig import Rig, killed_at
from tests.support.kernel_devfreq import KernelDevfreq

FREQUENCIES = ORIN_NANO_JP6.gpu_node.frequencies
VALUES = st.sampled_from([0, 100, 306, 408, 510, 612, 612.001, 700, 714, 918, 1020, 2000])


class Floor(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="floor-"))
        self.rig = Rig(self.directory)
        self.without_us = KernelDevfreq(FREQUENCIES)
        self.away = False
        self.unseen = False  # somebody wrote min_freq, and no look at it since
        self.others_max_writes = 0

    def teardown(self) -> None:
        try:
            self.everything_ends()
        finally:
            shutil.rmtree(self.directory)

    # -- inference, time, heat ---------------------------------------------------------

    @rule(active=st.booleans())
    def demand(self, active: bool) -> None:
        changes = active is (self.rig.state.who is None)
        self.rig.demand(active)
        if changes:
            self.looked()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 15.0]))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)
        if seconds > 1:
            self.looked()

    @rule()
    def heat(self) -> None:
        self.rig.throttling = "gpu-throttle-alert 1 of 1"
        # A put-back that failed is not tried again at once.
        self.rig.advance(1.1 if self.rig.state.who else RETRY_S + 1)
        self.looked()
        if not self.away and not self.rig.tree.kernel.faults:
            assert self.rig.tree.kernel.min_hz == self.without_us.min_hz

    @rule()
    def cool(self) -> None:
        self.rig.throttling = None

    @rule(mhz=st.sampled_from([None, 306, 500, 612, 5000]))
    def configure(self, mhz: int | None) -> None:
        self.rig.configure(frequency_hz=mhz * MHZ if mhz else None)
        self.looked()

    # -- other people -----------------------------------------------------------------

    @precondition(lambda self: not self.away)
    @rule(mhz=VALUES, notice=st.booleans())
    def write_min(self, mhz: float, notice: bool) -> None:
        ambiguous = self.looks_like_ours(mhz)
        if ambiguous and not self.rig.state.held:
            return  # a daemon that was killed, or cannot write: nobody is there to be told
        self.others("min_freq", mhz)
        if notice or ambiguous:
            self.told(min_freq=True)
        else:
            self.unseen = True

    @precondition(lambda self: not self.away)
    @rule(mhz=VALUES, notice=st.booleans())
    def write_max(self, mhz: float, notice: bool) -> None:
        if self.unseen:  # the new max could make theirs look like ours, clamped
            self.advance(1.1)
        if self.unseen:
            return
        self.others("max_freq", mhz)
        self.others_max_writes += 1
        if notice:
            self.told(min_freq=False)

    def looks_like_ours(self, mhz: float) -> bool:
        """Whether this min_freq, now, would read as something that we wrote."""
        kernel, held = self.rig.tree.kernel, self.rig.state.held
        saved = self.rig.baseline.load()
        shown = KernelDevfreq(FREQUENCIES)
        shown.write("max_freq", str(kernel.max_hz))
        shown.write("min_freq", str(round(mhz * MHZ)))
        ours = (held.values if held else ()) + (saved.ours_hz if saved else ())
        return in_place(ours, shown.min_hz, shown.max_hz)

    def looked(self) -> None:
        if self.rig.actuator.node or not self.rig.saved():
            self.unseen = False

    def others(self, attribute: str, mhz: float) -> None:
        text = str(round(mhz * MHZ))
        kernel = self.rig.tree.kernel
        faults, kernel.faults = kernel.faults, {}
        kernel.write(attribute, text)
        kernel.faults = faults
        self.without_us.write(attribute, text)

    def told(self, *, min_freq: bool) -> None:
        self.rig.feed(Touched(min_freq))

    # -- faults, the node, the daemon ---------------------------------------------------

    @rule(broken=st.booleans())
    def writing(self, broken: bool) -> None:
        self.rig.tree.kernel.faults = {"min_freq": errno.EIO} if broken else {}

    @precondition(lambda self: not self.away)
    @rule()
    def vanish(self) -> None:
        self.rig.tree.vanish()
        self.without_us = KernelDevfreq(FREQUENCIES)
        self.away, self.unseen = True, False

    @precondition(lambda self: self.away)
    @rule(event=st.booleans())
    def appear(self, event: bool) -> None:
        self.rig.tree.appear()
        self.rig.look(("17000000.gpu",) if event else ())
        self.away = False

    @rule()
    def look(self) -> None:
        self.rig.look()

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        if self.rig.state.touched:  # what was told and not yet looked at dies with it
            self.rig.advance(1.1)
        if not killed:
            self.rig.stop()
        self.rig.start()
        self.looked()

    @rule(step=st.integers(1, 30), what=st.sampled_from(["begin", "end", "tick"]), mhz=VALUES)
    def killed(self, step: int, what: str, mhz: float) -> None:
        """At a system call; somebody may write before the next daemon starts."""
        if self.rig.state.touched:
            self.rig.advance(1.1)
        with killed_at(step, self.rig):
            if what == "tick":
                self.rig.advance(1.1)
            else:
                self.rig.demand(what == "begin")
        # What looks like ours would be taken for ours.
        if not self.away and not self.looks_like_ours(mhz):
            self.others("min_freq", mhz)
        self.rig.start()
        self.looked()

    @rule()
    def everything_ends(self) -> None:
        """Each disturbance is over and nobody infers."""
        if self.away:
            self.appear(event=True)
        self.rig.tree.kernel.faults = {}
        self.rig.throttling = None
        self.rig.demand(False)
        self.rig.advance(30)
        self.rig.look()
        kernel = self.rig.tree.kernel
        assert kernel.min_hz == self.without_us.min_hz
        assert kernel.max_hz == self.without_us.max_hz
        assert not self.rig.saved()
        # A min above max is put back as max, so what the kernel remembers may differ.
        self.without_us._min_khz = kernel._min_khz
        self.looked()

    # -- always --------------------------------------------------------------------------

    @invariant()
    def what_is_ours_can_be_put_back(self) -> None:
        kernel = self.rig.tree.kernel
        if not self.away and kernel.min_hz != self.without_us.min_hz:
            assert self.rig.saved()

    @invariant()
    def only_supported_frequencies_and_never_max(self) -> None:
        actions, self.rig.actions = self.rig.actions, []
        for action in actions:
            assert _supported(action), action
        writes = self.rig.tree.kernel.writes
        assert {w.attribute for w in writes} <= {"min_freq", "max_freq"}
        assert sum(w.attribute == "max_freq" for w in writes) == self.others_max_writes


def _supported(action: Action) -> bool:
    return not isinstance(action, WriteMin) or action.hz in FREQUENCIES


Floor.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestFloor = Floor.TestCase
