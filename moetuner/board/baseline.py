"""The saved min_freq: written and synced before the first change, so that whatever
ends us leaves enough behind to put it back.

`/run/moetuner/baseline.json` exists while a value of ours may be in place. It lies on
a tmpfs: a reboot clears it, as it clears min_freq.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from moetuner.board.devfreq import CLASS, Devfreq, NodeGone
from moetuner.board.sysroot import Missing, SysRoot, Untrusted
from moetuner.errors import SystemRefused
from moetuner.floor import in_place, mhz, sane
from moetuner.log import ERROR, INFO, NOTICE, WARNING

PATH = "/run/moetuner/baseline.json"
_LIMIT = 4096  # bytes; ours has about 200
_HIGHEST_HZ = 100_000_000_000
_NAME = re.compile(r"[\w.:@-]{1,64}")


@dataclass(frozen=True)
class Baseline:
    """min_freq of `node` was `found_hz`; while it reads one of `ours_hz`, that is our doing."""

    node: str
    found_hz: int
    ours_hz: tuple[int, ...]
    boot_id: str
    pid: int
    version: int = 1


class BaselineFile:
    """Where the baseline is kept, below a board's root."""

    def __init__(self, root: SysRoot, path: str = PATH) -> None:
        self._root = root
        self._boot_id: str | None = None
        self.path = path

    def save(self, node: str, found_hz: int, ours_hz: Sequence[int]) -> None:
        """On disk when it returns. SystemRefused (`No space left on device`): then nothing
        may be raised."""
        if self._boot_id is None:  # a token waits: read it once, no boot lies between
            self._boot_id = self.boot_id()
        baseline = Baseline(node, found_hz, tuple(ours_hz), self._boot_id, os.getpid())
        self._root.replace(self.path, json.dumps(asdict(baseline)) + "\n")

    def load(self) -> Baseline | None:
        """What was saved; None: nothing. Untrusted or SystemRefused when it can't be believed."""
        try:
            text = self._root.read_state(self.path, _LIMIT)
        except Missing:
            return None
        try:
            return _parse(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise Untrusted(f"{self._root.path(self.path)} is damaged: {error}") from None

    def clear(self) -> None:
        self._root.remove(self.path)

    def boot_id(self) -> str:
        return self._root.read_optional("/proc/sys/kernel/random/boot_id") or "unknown"


def _parse(value: Any) -> Baseline:
    """ValueError names what is wrong; nothing is taken on trust."""
    expected = {"node", "found_hz", "ours_hz", "boot_id", "pid", "version"}
    if not isinstance(value, dict) or set(value) != expected:
        raise ValueError("not the keys that moetuner writes")
    if value["version"] != 1:
        raise ValueError("written by another version of moetuner")
    node, boot_id = value["node"], value["boot_id"]
    if not isinstance(node, str) or not _NAME.fullmatch(node) or set(node) == {"."}:
        raise ValueError("no name of a devfreq device")
    if not isinstance(boot_id, str):
        raise ValueError("no boot id")
    ours = value["ours_hz"]
    if not isinstance(ours, list) or not 1 <= len(ours) <= 16:
        raise ValueError("no list of frequencies")
    for hz in (value["found_hz"], *ours):
        if type(hz) is not int or not 0 <= hz <= _HIGHEST_HZ:
            raise ValueError("no frequency in Hz")
    if type(value["pid"]) is not int:
        raise ValueError("no process id")
    return Baseline(node, value["found_hz"], tuple(ours), boot_id, value["pid"])


class Outcome(Enum):
    NOTHING = "nothing was saved"
    RESTORED = "put back"
    ALREADY = "already as found"
    FOREIGN = "somebody else's value stands"
    IGNORED = "the file cannot be believed"
    WAITING = "the node is not there"
    FAILED = "could not be put back"


@dataclass(frozen=True)
class Recovery:
    """What `recover` did; `text` is for the log, empty when there is nothing to say."""

    outcome: Outcome
    text: str = ""
    priority: int = INFO


def recover(root: SysRoot, file: BaselineFile) -> Recovery:
    """Puts min_freq back to what a run that ended without doing so had found.

    For `moetuner restore` and for the daemon before it first reads a node. Any number
    of times is as good as once, and it may be interrupted anywhere. The file stays
    only while it is needed: WAITING and FAILED.
    """
    try:
        saved = file.load()
    except SystemRefused as error:
        return _drop(file, Outcome.IGNORED, f"{error.message}: ignored", WARNING)
    if saved is None:
        return Recovery(Outcome.NOTHING)
    if saved.boot_id != file.boot_id():
        text = "the saved min_freq is from before the last boot: ignored"
        return _drop(file, Outcome.IGNORED, text, NOTICE)
    node = Devfreq(root, saved.node)
    try:
        seen = node.read()
        found = sane(saved.found_hz, seen)
        if not seen.available or not seen.available[0] <= saved.found_hz <= seen.available[-1]:
            text = (
                f"the saved min_freq, {saved.found_hz} Hz, is out of {saved.node}'s range: ignored"
            )
            return _drop(file, Outcome.IGNORED, text, WARNING)
        if not in_place(saved.ours_hz, seen.min_hz, seen.max_hz):
            if seen.min_hz == min(found, seen.max_hz):
                return _drop(file, Outcome.ALREADY, "", INFO)
            text = f"min_freq of {saved.node} is {mhz(seen.min_hz)} by somebody else: left alone"
            return _drop(file, Outcome.FOREIGN, text, NOTICE)
        after = node.restore_min(found)
    except NodeGone:
        text = f"{root.path(CLASS)}/{saved.node} is not there: its min_freq is put back when it is"
        return Recovery(Outcome.WAITING, text, NOTICE)
    except SystemRefused as error:
        return Recovery(Outcome.FAILED, f"min_freq is still raised: {error.message}", ERROR)
    reached = after.min_hz == min(found, after.max_hz)
    if not reached and in_place(saved.ours_hz, after.min_hz, after.max_hz):
        text = f"min_freq still reads {mhz(after.min_hz)} after putting back {mhz(found)}"
        return Recovery(Outcome.FAILED, text, ERROR)
    text = f"floor {mhz(after.min_hz)} (left raised by process {saved.pid}, which ended)"
    return _drop(file, Outcome.RESTORED, text, NOTICE)


def _drop(file: BaselineFile, outcome: Outcome, text: str, priority: int) -> Recovery:
    try:
        file.clear()
    except SystemRefused as error:
        # A stale file is harmless: it is judged anew each time.
        return Recovery(outcome, "; ".join(filter(None, (text, error.message))), WARNING)
    return Recovery(outcome, text, priority)
