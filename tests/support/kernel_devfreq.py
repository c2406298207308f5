"""A devfreq device that behaves as the kernel's (6.1 core), without a kernel.

The rules, as tried on a real device: a write is parsed as far as it is a decimal
number; min_freq is floored to kHz, max_freq ceiled, both kept as a signed 32-bit
number of kHz; nothing out of range is refused; what is shown is clamped; a min_freq
above max_freq is remembered and comes back when max_freq rises; the last writer wins.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_NO_LIMIT = 0x7FFFFFFF  # kHz: PM_QOS_MAX_FREQUENCY_DEFAULT_VALUE
WRITABLE = ("min_freq", "max_freq")


def _signed32(khz: int) -> int:
    khz &= 0xFFFFFFFF
    return khz - 0x100000000 if khz & 0x80000000 else khz


def _unsigned64(value: int) -> int:
    return value & 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Write:
    """A write that took place, or was refused with `error`."""

    attribute: str
    text: str
    error: int = 0


class KernelDevfreq:
    """Frequencies in Hz, ascending. `wish_hz` is what the governor would choose."""

    def __init__(self, frequencies: Sequence[int], governor: str = "nvhost_podgov") -> None:
        self.frequencies = tuple(sorted(frequencies))
        self.governor = governor
        self.wish_hz = 0
        self.writes: list[Write] = []
        self.faults: dict[str, int] = {}  # attribute → errno of each write to it
        self._min_khz = 0
        self._max_khz = _NO_LIMIT

    @property
    def max_hz(self) -> int:
        highest = self.frequencies[-1]
        if self._max_khz == _NO_LIMIT:
            return highest
        return min(highest, _unsigned64(1000 * self._max_khz))

    @property
    def min_hz(self) -> int:
        return min(max(self.frequencies[0], _unsigned64(1000 * self._min_khz)), self.max_hz)

    @property
    def cur_hz(self) -> int:
        """The lowest supported frequency that satisfies min; rounded down where max caps it."""
        wanted = min(max(self.wish_hz, self.min_hz), self.max_hz)
        index = bisect_left(self.frequencies, wanted)
        if index < len(self.frequencies) and self.frequencies[index] <= self.max_hz:
            return self.frequencies[index]
        return self.frequencies[max(bisect_right(self.frequencies, self.max_hz) - 1, 0)]

    def read(self, attribute: str) -> str:
        """What `cat` shows. OSError ENOENT for an attribute that devfreq does not have."""
        match attribute:
            case "min_freq":
                return f"{self.min_hz}\n"
            case "max_freq":
                return f"{self.max_hz}\n"
            case "cur_freq" | "target_freq":
                return f"{self.cur_hz}\n"
            case "available_frequencies":
                return " ".join(map(str, self.frequencies)) + "\n"
            case "governor":
                return f"{self.governor}\n"
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def write(self, attribute: str, text: str) -> None:
        """OSError as the kernel's: EINVAL without a number, EACCES for what is read-only."""
        error = self.faults.get(attribute, 0)
        number = re.match(r"\s*(\d+)", text)
        if not error and attribute not in WRITABLE:
            error = errno.EACCES
        if not error and number is None:
            error = errno.EINVAL
        self.writes.append(Write(attribute, text.rstrip("\n"), error))
        if error:
            raise OSError(error, os.strerror(error))
        assert number is not None
        value = _unsigned64(int(number[1]))
        if attribute == "min_freq":
            khz = _signed32(value // 1000)
            # -1 is PM QoS's "default value"
            self._min_khz = 0 if khz == -1 else khz
        else:
            khz = _signed32(-(-value // 1000)) if value else _NO_LIMIT
            self._max_khz = _NO_LIMIT if khz == -1 else khz
