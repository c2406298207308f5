"""`moetuner --check`: is this machine ready, and what is to do if not.

Each finding is ok, a warning (it works, but read this) or missing (it cannot work).
What the daemon does at its start is not told from a copy of it but done: the same
functions find the node, the headers and the files, and, as root, load the probe.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

import moetuner
from moetuner import config, floor, moe, status
from moetuner.board import devfreq, identity
from moetuner.board.hotplug import Hotplug
from moetuner.board.sysroot import SysRoot
from moetuner.board.throttle import Throttle
from moetuner.config import Config
from moetuner.errors import MoetunerError
from moetuner.log import printable
from moetuner.watch import headers, survey
from moetuner.watch.bpf import LibBpf
from moetuner.watch.kernel import UprobePmu
from moetuner.watch.mappings import Mappings
from moetuner.watch.program import load

OK, WARNING, MISSING = "ok", "warning", "missing"
# Programs that write the same files: noticed and respected, but better not used together.
POWER_TOOLS = ("jetson_clocks", "nvpmodel", "moe-gpu-stabilizer", "tuned", "power-profiles-daemon")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it (or None)."""

    name: str
    state: str
    text: str
    todo: str | None = None


def run(root: Path, config_path: Path | None) -> list[Finding]:
    """All findings. Changes nothing, and needs no root (it says what root would add)."""
    board = SysRoot(root)
    findings: list[Finding] = []
    settings = Config()
    try:
        settings = config.load(config_path or config.DEFAULT_PATH, optional=config_path is None)
        findings.append(Finding("configuration", OK, settings.source))
    except MoetunerError as error:
        findings.append(Finding("configuration", MISSING, error.message, error.hint))
    findings.extend(_board(board, settings))
    findings.extend(_ebpf())
    findings.extend(_llama(settings))
    findings.extend(_power_tools(board))
    findings.append(_daemon(board))
    return findings


def _board(root: SysRoot, settings: Config) -> Iterator[Finding]:
    who = identity.identify(root)
    if who.jetson:
        old = who.jetpack is not None and who.jetpack < 6
        yield Finding(
            "board",
            WARNING if old else OK,
            str(who),
            "moetuner is made for JetPack 6 and 7" if old else None,
        )
    else:
        yield Finding(
            "board", WARNING, f"not a Jetson ({platform.machine()})", "try ./install.sh --demo"
        )
    found = devfreq.find(root, settings.floor.node)
    if found.name is None:
        yield Finding(
            "gpu", MISSING, found.why, "the daemon waits until it appears; floor.node can name it"
        )
    else:
        yield from _node(root, settings, found)
    problem = Hotplug().problem
    yield Finding(
        "hotplug",
        OK if problem is None else WARNING,
        "a node that appears later is noticed at once" if problem is None else problem,
        None if problem is None else "it is noticed within seconds all the same",
    )


def _node(root: SysRoot, settings: Config, found: devfreq.Finding) -> Iterator[Finding]:
    assert found.name is not None
    node = devfreq.Devfreq(root, found.name)
    try:
        now = node.read()
    except MoetunerError as error:
        yield Finding("gpu", MISSING, error.message, error.hint)
        return
    clock = floor.mhz(now.cur_hz) if now.cur_hz else "clock not told"
    limits = f"{floor.mhz(now.min_hz)} to {floor.mhz(now.max_hz)}"
    governor = node.governor() or "unknown"
    yield Finding("gpu", OK, f"{found.why}; {clock}, allowed {limits}, governor {governor}")
    if now.min_hz == now.max_hz and len(now.available) > 1:
        yield Finding(
            "gpu floor",
            WARNING,
            f"min_freq equals max_freq ({floor.mhz(now.max_hz)}): nothing is left to raise",
            "jetson_clocks does this; jetson_clocks --restore undoes it",
        )
    wanted = settings.floor.frequency_hz
    if wanted is not None and wanted not in now.available:
        yield Finding(
            "gpu floor",
            WARNING,
            f"floor.frequency {floor.mhz(wanted)} is not supported",
            "supported: " + ", ".join(floor.mhz(hz) for hz in now.available),
        )
    why = Throttle(root).read()
    if why is not None:
        yield Finding("throttling", WARNING, why, "the floor is not raised while it lasts")


def _ebpf() -> Iterator[Finding]:
    def attempt(name: str, action: Callable[[], str]) -> Finding:
        try:
            return Finding(name, OK, action())
        except MoetunerError as error:
            return Finding(name, MISSING, error.message, error.hint)

    def pmu() -> str:
        UprobePmu.find()
        return "the kernel has uprobes"

    def libraries() -> str:
        LibBpf()
        if importlib.util.find_spec("bcc") is None:
            from moetuner.watch.loader import BCC_HINT

            raise MoetunerError(f"bcc is not installed for {sys.executable}", BCC_HINT)
        return "bcc and libbpf are installed"

    yield attempt("uprobes", pmu)
    yield attempt("libraries", libraries)
    yield attempt("headers", lambda: headers.find().describe())
    if importlib.util.find_spec("capstone") is None:
        yield Finding(
            "returns",
            WARNING,
            "capstone is not installed: returns are probed with uretprobes, and a program whose "
            "llama_decode throws a C++ exception would be ended by that",
            "apt-get install python3-capstone",
        )
    if os.geteuid() != 0:
        yield Finding(
            "eBPF", WARNING, "not tried: only root can load the probe", "sudo moetuner --check"
        )
        return

    def load_probe() -> str:
        program = load()
        program.close()
        Mappings().close()
        return "the probe compiles, loads and is accepted by the kernel"

    yield attempt("eBPF", load_probe)


def _llama(settings: Config) -> Iterator[Finding]:
    files, processes = survey.survey(settings.watch.libraries)
    unseen = "" if os.geteuid() == 0 else " (only your own processes can be seen; use sudo)"
    if not files:
        yield Finding(
            "llama.cpp",
            WARNING,
            f"none in use now{unseen}",
            "it is noticed when it starts; watch.libraries can name files",
        )
    for file in files:
        pids = f"pids {', '.join(map(str, file.pids))}" if file.pids else "not in use"
        if file.problem:
            yield Finding("llama.cpp", MISSING, f"{file.path}: {file.problem}")
        else:
            caveat = f"; returns by uretprobe: {file.unclear}" if file.unclear else ""
            names = ", ".join(file.functions)
            yield Finding(
                "llama.cpp", WARNING if caveat else OK, f"{file.path} ({names}{caveat}), {pids}"
            )
    for process in processes:
        verdict = moe.judge(process.argv, process.environ, process.exe, settings.match)
        does = "counts" if verdict.counts else "does not count"
        name = printable(process.comm)
        yield Finding("process", OK, f"pid {process.pid} {name} {does}: {verdict.reason}")


def _power_tools(root: SysRoot) -> Iterator[Finding]:
    running: dict[str, int] = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        words = [process.info["name"] or "", *(process.info["cmdline"] or [])[:2]]
        for tool in POWER_TOOLS:
            if any(os.path.basename(word) == tool for word in words):
                running[tool] = process.pid
    for tool, pid in running.items():
        yield Finding(
            "power tools",
            WARNING,
            f"{tool} is running (pid {pid}) and may write min_freq too",
            "its writes are noticed and respected; better use one of the two",
        )
    mode = root.read_optional("/var/lib/nvpmodel/status")
    if mode:
        yield Finding("power mode", OK, f"nvpmodel {printable(mode, 60)}")


def _daemon(root: SysRoot) -> Finding:
    try:
        snapshot = status.read(root)
    except MoetunerError as error:
        return Finding("daemon", WARNING, error.message, error.hint)
    return Finding("daemon", OK, f"runs as pid {snapshot['pid']} (moetuner {snapshot['moetuner']})")


def exit_code(findings: list[Finding]) -> int:
    return 1 if any(finding.state == MISSING for finding in findings) else 0


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "moetuner": moetuner.__version__,
        "ready": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: list[Finding]) -> None:
    """One line a finding, in colour in a terminal; what to do below it."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    codes = {OK: "32", WARNING: "33", MISSING: "31"}
    for finding in findings:
        state = f"{finding.state:<8}"
        if colour:
            state = f"\x1b[{codes[finding.state]}m{state}\x1b[0m"
        print(f"{state} {finding.name:<14}{finding.text}")
        if finding.todo:
            print(f"{'':23}→ {finding.todo}")
