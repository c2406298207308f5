"""How `moetuner status` looks: once as plain lines, or live."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moetuner import live, status
from moetuner.board.sysroot import SysRoot
from moetuner.board.telemetry import JtopPower, Sample, Telemetry
from moetuner.errors import NotSo
from moetuner.floor import mhz
from moetuner.live import Rows
from moetuner.status import Snapshot


def show(snapshot: Snapshot, root: SysRoot) -> None:
    """The daemon's state on standard output."""
    sample = Telemetry(root, snapshot["node"]).read()
    live.show(rows(snapshot, sample, {}))


def rows(snapshot: Snapshot, sample: Sample, rates: dict[int, float]) -> Rows:
    """For people. `rates`: pid → calls/s."""
    lines = [("floor", _floor(snapshot)), ("GPU", _gpu(snapshot, sample))]
    if sample.power_mw is not None:
        lines.append(("power", f"{sample.power_mw / 1000:.2f} W ({sample.power_source})"))
    if sample.temperatures_c:
        hottest = max(sample.temperatures_c, key=lambda zone: sample.temperatures_c[zone])
        lines.append(("hottest", f"{sample.temperatures_c[hottest]:.1f} °C ({hottest})"))
    heading = "processes"
    for process in snapshot["processes"]:
        rate = f", {rates[process['pid']]:.1f} calls/s" if process["pid"] in rates else ""
        state = "infers" if process["infers"] else "idle"
        counted = f"{process['calls']} calls{rate}, {state}" if process["counts"] else "not counted"
        lines.append(
            (heading, f"pid {process['pid']} {process['name']}: {counted}; {process['reason']}")
        )
        heading = ""
    if not snapshot["processes"]:
        lines.append(("processes", "none has called llama.cpp yet"))
    more = snapshot["totals"]["processes"] - len(snapshot["processes"])
    if more > 0:
        lines.append(("", f"and {more} more"))
    heading = "watching"
    for library in snapshot["libraries"]:
        why = f": {library['why']}" if library["why"] else ""
        returns = f" ({', '.join(library['functions'])})" if library["functions"] else ""
        lines.append((heading, f"{library['path']} {library['state']}{returns}{why}"))
        heading = ""
    if not snapshot["libraries"]:
        lines.append(("watching", "no llama.cpp found yet"))
    probe = snapshot["probe"]
    lines.append(
        (
            "probe",
            f"{probe['wakeups']} wake-ups, {probe['lost']} records lost, "
            f"{probe['unmatched']} unmatched returns, {probe['unwound']} unwound calls",
        )
    )
    if snapshot["configuration"]["error"]:
        lines.append(("config", f"not reloaded: {snapshot['configuration']['error']}"))
    return lines


def _floor(snapshot: Snapshot) -> str:
    floor = snapshot["floor"]
    if floor["raised_hz"]:
        who = floor["who"] or "idle, but not put back yet"
        return f"{mhz(floor['raised_hz'])} ({who}); {mhz(floor['found_hz'])} was found"
    if floor["obstacle"]:
        return f"not raised, although {floor['who']}: {floor['obstacle']}"
    return "not raised (idle)"


def _gpu(snapshot: Snapshot, sample: Sample) -> str:
    if snapshot["node"] is None:
        return "no devfreq node yet"
    clock = mhz(sample.gpu_hz) if sample.gpu_hz is not None else "clock unknown"
    limits = ""
    if sample.gpu_min_hz is not None and sample.gpu_max_hz is not None:
        limits = f" of {mhz(sample.gpu_min_hz)} to {mhz(sample.gpu_max_hz)}"
    load = f", load {sample.gpu_load_percent:.0f} %" if sample.gpu_load_percent is not None else ""
    return f"{clock}{limits}{load} ({snapshot['node']})"


@dataclass
class Rates:
    """Calls per second of each process, between two snapshots that differ in time."""

    last: tuple[float, dict[int, int]] | None = None
    current: dict[int, float] | None = None

    def update(self, snapshot: Snapshot) -> dict[int, float]:
        calls = {p["pid"]: p["calls"] for p in snapshot["processes"] if p["counts"]}
        at = snapshot["updated"]
        if self.last is not None and at > self.last[0]:
            before_at, before = self.last
            self.current = {
                pid: (count - before[pid]) / (at - before_at)
                for pid, count in calls.items()
                if pid in before and count >= before[pid]  # else another process by now
            }
        if self.last is None or at > self.last[0]:
            self.last = (at, calls)
        # No newer snapshot for a while: nothing has happened.
        stale = time.time() - at > 2 * status.COUNTERS_EVERY_S
        return dict.fromkeys(calls, 0.0) if stale else dict(self.current or {})


def watch(root: SysRoot) -> None:
    """Shows the state until Ctrl-C (see live.py)."""
    rates = Rates()
    jtop = JtopPower(root)
    telemetry: Telemetry | None = None

    def current() -> Rows:
        nonlocal telemetry
        try:
            snapshot = status.read(root)
        except NotSo as error:
            return [("daemon", str(error))]
        if telemetry is None or telemetry.node != snapshot["node"]:
            telemetry = Telemetry(root, snapshot["node"], jtop)
        return rows(snapshot, telemetry.read(), rates.update(snapshot))

    def style(name: str, text: str) -> str:
        return "green" if name == "floor" and "MHz (" in text else ""

    try:
        live.watch("moetuner", current, style)
    finally:
        jtop.close()
