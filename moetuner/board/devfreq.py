"""The GPU's devfreq node: finding it, reading it, writing min_freq.

The kernel refuses next to nothing here: it takes frequencies out of range, rounds
them silently and shows min_freq clamped. So values are checked before they are
written and read back after.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moetuner.board.sysroot import Missing, SysRoot
from moetuner.errors import SystemRefused
from moetuner.floor_events import Reading

CLASS = "/sys/class/devfreq"

# device/of_node/name of the GPUs that NVIDIA's driver registers, Xavier to Orin, and
# the device names they appear under (Nano and TX2 too).
_OF_NAMES = ("gv11b", "gp10b", "ga10b", "gb10b", "gm20b", "gpu")
_PLATFORM = re.compile(r"[0-9a-f]+\.(gv11b|gp10b|ga10b|gb10b|gm20b|gpu)")
# Thor has one node a clock domain and no of_node: gpc is the graphics clusters, which
# run CUDA; nvd the video engines, which do not.
_CLUSTERS = re.compile(r"gpu-gpc-\d+")
_VIDEO = re.compile(r"gpu-nvd-\d+")
_NVIDIA_PCI = "0x10de"


class NodeGone(Missing):
    """The node, or an attribute it had, is not there any more."""


class NotWritten(SystemRefused):
    """The value was not written: the node does not support it."""


@dataclass(frozen=True)
class Finding:
    """Which node is the GPU (`name` None: none yet) and one sentence why."""

    name: str | None
    why: str


def find(root: SysRoot, configured: str | None = None) -> Finding:
    """The GPU among the devfreq devices.

    Preference: the configured name; then Thor's graphics clusters; then what the
    device tree calls a GPU; then a GPU's device name. Several of one rank: the first
    by name. Thor's video domain is taken only if configured, because it may appear
    before the one that matters. Memory controllers, buses and other firms' GPUs never.
    """
    names = root.children(CLASS)
    ranked = sorted(
        (rank, name, why) for name in names for rank, why in (_rank(root, name),) if rank
    )
    if configured is not None:
        return _configured(root, configured, names)
    if not ranked:
        if not names:
            return Finding(None, f"no devfreq device in {root.path(CLASS)} yet")
        return Finding(None, f"no GPU among the devfreq devices yet ({_shown(names)})")
    _, name, why = ranked[0]
    others = [other for _, other, _ in ranked[1:]] + [n for n in names if _VIDEO.fullmatch(n)]
    return Finding(name, f"{name}: {why}" + (f"; not {_shown(others)}" if others else ""))


def _configured(root: SysRoot, configured: str, names: Sequence[str]) -> Finding:
    if configured not in names:
        there = f" (there: {_shown(names)})" if names else ""
        return Finding(None, f"{configured}, which the configuration names, is not there{there}")
    rank, why = _rank(root, configured)
    if rank is None and not _VIDEO.fullmatch(configured):
        return Finding(None, f"{configured}, which the configuration names, {why}")
    return Finding(configured, f"{configured}: the configuration names it")


def _rank(root: SysRoot, name: str) -> tuple[int | None, str]:
    """(1 is best, None: no GPU of ours; and why, for the log)"""
    device = f"{CLASS}/{name}/device"
    vendor = root.read_optional(f"{device}/vendor")
    if vendor is not None and vendor != _NVIDIA_PCI:
        return None, f"is not NVIDIA's (PCI vendor {vendor[:10]})"
    compatible = root.read_optional(f"{device}/of_node/compatible")
    if compatible is not None and "nvidia," not in compatible:
        return None, "is not NVIDIA's"
    if _CLUSTERS.fullmatch(name):
        return 1, "the GPU's graphics clusters"
    if _VIDEO.fullmatch(name):
        return None, "is the GPU's video engines"
    tree_name = root.read_optional(f"{device}/of_node/name")
    if tree_name in _OF_NAMES:
        return 2, f"the device tree calls it {tree_name}"
    if tree_name is None and _PLATFORM.fullmatch(name):
        return 3, "a GPU by its name"
    return None, "is not a GPU"


def _shown(names: Sequence[str]) -> str:
    """At most four names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Devfreq:
    """One node below /sys/class/devfreq.

    Each method raises NodeGone when the node went away, and SystemRefused when it
    answers with an error or with something that is no frequency.
    """

    def __init__(self, root: SysRoot, name: str) -> None:
        self.name = name
        self._root = root
        self._directory = f"{CLASS}/{name}"
        self._available: tuple[int, ...] | None = None

    def read(self) -> Reading:
        """The node as it is now. `available` is read once: it does not change."""
        return Reading(
            node=self.name,
            min_hz=self._number("min_freq"),
            max_hz=self._number("max_freq"),
            # A suspended GPU may have none to tell.
            cur_hz=self._root.read_int_optional(f"{self._directory}/cur_freq"),
            available=self._frequencies(),
        )

    def governor(self) -> str | None:
        return self._root.read_optional(f"{self._directory}/governor")

    def write_min(self, hz: int) -> Reading:
        """Writes a supported frequency to min_freq; the node as it reads after that.

        NotWritten when available_frequencies does not have it.
        """
        if hz not in self._frequencies():
            raise NotWritten(f"{self.name} does not support {hz} Hz: min_freq left as it is")
        return self._write(hz)

    def restore_min(self, hz: int) -> Reading:
        """Writes a value that min_freq had to it; the node as it reads after that.

        It need not be a supported frequency, since the kernel does not round what it
        stores. NotWritten when it is outside what the node supports.
        """
        available = self._frequencies()
        if not available or not available[0] <= hz <= available[-1]:
            raise NotWritten(f"{hz} Hz is out of {self.name}'s range: min_freq left as it is")
        return self._write(hz)

    def _write(self, hz: int) -> Reading:
        try:
            self._root.write(f"{self._directory}/min_freq", str(hz))
        except Missing as error:
            raise NodeGone(error.message) from error
        return self.read()

    def _number(self, attribute: str) -> int:
        try:
            return self._root.read_int(f"{self._directory}/{attribute}")
        except Missing as error:
            raise NodeGone(error.message) from error

    def _frequencies(self) -> tuple[int, ...]:
        if self._available is None:
            self._available = self._read_frequencies()
        return self._available

    def _read_frequencies(self) -> tuple[int, ...]:
        path = f"{self._directory}/available_frequencies"
        try:
            text = self._root.read(path)
        except Missing as error:
            raise NodeGone(error.message) from error
        try:
            return tuple(sorted({int(word) for word in text.split()}))
        except ValueError:
            raise SystemRefused(
                f"{self._root.path(path)} holds {text[:60]!r}, not frequencies"
            ) from None
