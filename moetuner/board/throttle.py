"""Whether the board throttles for heat, from /sys/class/thermal.

The signs, in Jetson's names:
- a cooling device `*-throttle-alert` (cpu, gpu, cv0, soc012 …) or, on Nano,
  `*-balanced`: the chip is being throttled. All share one die and one budget, so a
  throttled CPU is reason enough to take the GPU's floor away;
- the cooling device `devfreq-NODE` of the GPU: its clock is capped;
- a GPU or junction zone at a passive trip that throttles something.

Not signs: `pwm-fan` at work, and `hot-surface-alert`, which only warns that the heat
sink is hot to the touch (70 °C) and switches hundreds of times an hour under load.
Its trip is `passive` too, hence the look at what a trip is bound to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moetuner.board.sysroot import SysRoot

CLASS = "/sys/class/thermal"

_THROTTLES = re.compile(
    r"[\w-]*throttle-alert|[\w-]*(balanced|heavy)|devfreq-([0-9a-f]+\.)?(g|gpu[\w-]*)"
    r"|devfreq-[0-9a-f]+\.(gv11b|gp10b|ga10b|gb10b|gm20b)",
)
_HARMLESS = re.compile(r"[\w-]*(fan|surface)[\w-]*")
_ZONES = re.compile(r"(gpu|tj)[-_]?(therm(al)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class _Cooler:
    type: str
    cur_state: str
    max_state: str


@dataclass(frozen=True)
class _Zone:
    type: str
    temp: str
    trips_mc: tuple[int, ...]  # thousandths of a degree


class Throttle:
    """Reads a handful of files; which ones is found out again when devices change."""

    def __init__(self, root: SysRoot) -> None:
        self._root = root
        self._names: list[str] = []
        self._coolers: tuple[_Cooler, ...] = ()
        self._zones: tuple[_Zone, ...] = ()

    def read(self) -> str | None:
        """What throttles now, for the log (`gpu-throttle-alert 1 of 2`); None: nothing.

        What can't be read is no sign: a zone of a GPU that sleeps answers EAGAIN.
        """
        names = self._root.children(CLASS)
        if names != self._names:
            self._names = names
            self._coolers = tuple(c for n in names for c in (self._cooler(n),) if c)
            self._zones = tuple(z for n in names for z in (self._zone(n),) if z)
        for cooler in self._coolers:
            state = self._root.read_int_optional(cooler.cur_state)
            if state is not None and state > 0:
                highest = self._root.read_int_optional(cooler.max_state)
                return f"{cooler.type} {state}" + (f" of {highest}" if highest else "")
        for zone in self._zones:
            temp = self._root.read_int_optional(zone.temp)
            if temp is not None and any(temp >= trip for trip in zone.trips_mc):
                return f"{zone.type} {temp / 1000:.1f} °C"
        return None

    def _cooler(self, name: str) -> _Cooler | None:
        directory = f"{CLASS}/{name}"
        kind = self._root.read_optional(f"{directory}/type") or ""
        if not name.startswith("cooling_device") or not _throttles(kind):
            return None
        return _Cooler(kind, f"{directory}/cur_state", f"{directory}/max_state")

    def _zone(self, name: str) -> _Zone | None:
        directory = f"{CLASS}/{name}"
        kind = self._root.read_optional(f"{directory}/type") or ""
        if not name.startswith("thermal_zone") or not _ZONES.fullmatch(kind):
            return None
        files = self._root.children(directory)
        bound = [f for f in files if re.fullmatch(r"cdev\d+", f)]
        harmful = {
            self._root.read_int_optional(f"{directory}/{cdev}_trip_point")
            for cdev in bound
            if not _HARMLESS.fullmatch(self._root.read_optional(f"{directory}/{cdev}/type") or "")
        }
        trips = []
        for file in files:
            match = re.fullmatch(r"trip_point_(\d+)_type", file)
            if not match or self._root.read_optional(f"{directory}/{file}") != "passive":
                continue
            # A kernel that tells no bindings leaves only the trip itself to go by.
            if bound and int(match[1]) not in harmful:
                continue
            trip = self._root.read_int_optional(f"{directory}/trip_point_{match[1]}_temp")
            if trip is not None and trip > 0:
                trips.append(trip)
        return _Zone(kind, f"{directory}/temp", tuple(trips)) if trips else None


def _throttles(kind: str) -> bool:
    return bool(_THROTTLES.fullmatch(kind)) and not _HARMLESS.fullmatch(kind)
