"""Power, clock, load and temperatures of the board, for people to look at.

Nothing decides by these. What is not available is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moetuner.board.devfreq import CLASS as DEVFREQ
from moetuner.board.sysroot import SysRoot

HWMON = "/sys/class/hwmon"
THERMAL = "/sys/class/thermal"
JTOP_SOCKET = "/run/jtop.sock"
# The rail that feeds the whole board: Orin Nano and NX, Xavier NX; Nano.
_BOARD_RAILS = ("VDD_IN", "POM_5V_IN")


@dataclass(frozen=True)
class Sample:
    """One look at the board."""

    power_mw: int | None = None  # of the whole board
    power_source: str | None = None  # `INA3221 VDD_IN`, `jtop`
    rails_mw: Mapping[str, int] = field(default_factory=dict)
    gpu_hz: int | None = None
    gpu_min_hz: int | None = None
    gpu_max_hz: int | None = None
    gpu_load_percent: float | None = None
    temperatures_c: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rail:
    label: str
    volts: str  # file, mV
    amperes: str  # file, mA


class Telemetry:
    """Files are found once, at the first read; `node` is the GPU's devfreq name."""

    def __init__(
        self,
        root: SysRoot,
        node: str | None,
        jtop_power_mw: Callable[[], int | None] | None = None,
    ) -> None:
        self.node = node
        self._root = root
        self._jtop_power_mw = jtop_power_mw
        self._rails: tuple[_Rail, ...] | None = None

    def read(self) -> Sample:
        """Never raises."""
        if self._rails is None:
            self._rails = tuple(self._find_rails())
        rails = {}
        for rail in self._rails:
            volts = self._root.read_int_optional(rail.volts)
            amperes = self._root.read_int_optional(rail.amperes)
            if volts is not None and amperes is not None:
                rails[rail.label] = round(volts * amperes / 1000)
        power, source = self._power(rails)
        number = self._devfreq
        load = number("device/load")
        return Sample(
            power_mw=power,
            power_source=source,
            rails_mw=rails,
            gpu_hz=number("cur_freq"),
            gpu_min_hz=number("min_freq"),
            gpu_max_hz=number("max_freq"),
            # nvgpu tells it in tenths of a percent
            gpu_load_percent=None if load is None else load / 10,
            temperatures_c=self._temperatures(),
        )

    def _power(self, rails: Mapping[str, int]) -> tuple[int | None, str | None]:
        for label in _BOARD_RAILS:
            if label in rails:
                return rails[label], f"INA3221 {label}"
        power = self._jtop_power_mw() if self._jtop_power_mw else None
        return (None, None) if power is None else (power, "jtop")

    def _devfreq(self, attribute: str) -> int | None:
        if self.node is None:
            return None
        return self._root.read_int_optional(f"{DEVFREQ}/{self.node}/{attribute}")

    def _find_rails(self) -> list[_Rail]:
        rails = []
        for name in self._root.children(HWMON):
            directory = f"{HWMON}/{name}"
            if self._root.read_optional(f"{directory}/name") != "ina3221":
                continue
            for file in self._root.children(directory):
                match = re.fullmatch(r"in(\d+)_label", file)
                label = self._root.read_optional(f"{directory}/{file}") if match else None
                # Channels 4 to 7 are shunt voltages and their sum: no current, no rail.
                if not match or not label or "shunt" in label or label == "NC":
                    continue
                amperes = f"{directory}/curr{match[1]}_input"
                if self._root.exists(amperes):
                    rails.append(_Rail(label, f"{directory}/in{match[1]}_input", amperes))
        return rails

    def _temperatures(self) -> dict[str, float]:
        found = {}
        for name in self._root.children(THERMAL):
            if not name.startswith("thermal_zone"):
                continue
            kind = self._root.read_optional(f"{THERMAL}/{name}/type")
            temp = self._root.read_int_optional(f"{THERMAL}/{name}/temp")
            # -256 °C and the like is what an unpowered sensor says.
            if kind and temp is not None and -100_000 < temp < 200_000:
                found[kind] = temp / 1000
        return found


class JtopPower:
    """Board power from jtop (jetson-stats), where it is installed and its service runs."""

    def __init__(self, root: SysRoot) -> None:
        self._jtop: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self.problem: str | None = None
        if not root.exists(JTOP_SOCKET):
            self.problem = "jtop's service does not run"
            return
        try:
            import jtop
        except ImportError:
            self.problem = "jetson-stats is not installed"
            return
        self._errors = (jtop.JtopException, OSError, EOFError, RuntimeError)
        try:
            client = jtop.jtop()
            client.start()
        except self._errors as error:
            self.problem = f"jtop: {error}"
            return
        self._jtop = client

    def __call__(self) -> int | None:
        """Milliwatts; None: not told."""
        if self._jtop is None:
            return None
        try:
            # Without spin it would wait for jtop's next second.
            power = self._jtop.power["tot"]["power"] if self._jtop.ok(spin=True) else None
        except self._errors as error:
            self.problem = f"jtop: {error}"
            return None
        except (KeyError, TypeError):
            return None
        return power if isinstance(power, int) else None

    def close(self) -> None:
        if self._jtop is not None:
            self._jtop.close()
            self._jtop = None
