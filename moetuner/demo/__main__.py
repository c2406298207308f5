"""Shows the GPU floor at work on a simulated board, and the expert cache beside stock
llama.cpp, with everything else real.

    python3 -m moetuner.demo [--keep] [--cache DIR] [--llama DIR] [--json]

Needs root (eBPF), a compiler the first time, and gguf and numpy. Ends with 0 only if
every check held. Takes about a minute once llama.cpp is built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from moetuner.demo import board as boards
from moetuner.demo import llamacpp
from moetuner.demo.console import Console, duration
from moetuner.demo.record import Recorder, others
from moetuner.demo.services import Daemon, LlamaServer, Service, start_governor
from moetuner.demo.show import HOLD_S, Outcome, Stage, servers
from moetuner.demo.witness import Witness
from moetuner.errors import MissingRequirement, MoetunerError, NotSo

ATTACH_S = 15.0
CONFIGURATION = f"""\
# The demonstration's configuration: the defaults, with the hold written out.
floor:
  hold: {HOLD_S:g}
"""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM; unwinds through the clean-up."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(sys.stderr if options.json else sys.stdout)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    try:
        outcome = _run(options, console)
    except Interrupted:
        console.line()
        console.line("Interrupted; everything that was started is stopped and removed.", "yellow")
        return 130
    except MoetunerError as error:
        console.line()
        print(f"moetuner: {error}", file=sys.stderr)
        return error.exit_code
    _summarise(console, outcome, time.monotonic() - began)
    if options.json:
        print(json.dumps(_summary(outcome)))
    return 0 if outcome.good else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m moetuner.demo",
        description="Show the GPU floor at work: the real daemon and a real llama-server with a "
        "small MoE model, on a simulated Jetson board; then the expert cache beside stock "
        "llama.cpp with a model larger than the memory it gets. Needs root.",
        epilog="Example: sudo python3 -m moetuner.demo --keep",
    )
    parser.add_argument("--keep", action="store_true", help="leave it running at the end")
    parser.add_argument(
        "--cache", metavar="DIR", help="for llama.cpp and models (default: ~/.cache/moetuner)"
    )
    parser.add_argument(
        "--llama", metavar="DIR", type=Path, help="use this build directory of llama.cpp"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)  # the clean-up is not to be interrupted
    raise Interrupted


def _run(options: argparse.Namespace, console: Console) -> Outcome:
    if os.geteuid() != 0:
        raise MissingRequirement("the demonstration needs root: it attaches eBPF probes", "sudo")
    cache = llamacpp.cache_directory(options.cache)
    console.step("llama.cpp")
    built = (
        llamacpp.describe(options.llama.absolute())
        if options.llama
        else llamacpp.ensure(cache, console)
    )
    console.line(f"  {built.server}")
    console.step("Models with random weights")
    moe, dense = _models(cache)
    for model in (moe, dense):
        console.line(f"  {model} ({model.stat().st_size / 1e6:.1f} MB)")
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="moetuner-demo-", dir=_in_memory()))
        keep = _Keep()
        stack.callback(lambda: None if keep.kept else shutil.rmtree(directory, ignore_errors=True))
        stage, cast, recorder = _set_up(directory, built, (moe, dense), console, stack, keep)
        _play(stage, cast, options.keep)
        # Needs gguf and numpy, which _models has seen.
        from moetuner.demo.sidebyside import compare

        compare(built, directory, cache, console, stage.outcome)
        ours = frozenset(service.pid for service in keep.services)
        foreign = [] if stage.outcome.good else others(recorder.since(0).journal, ours)
        for line in foreign:
            console.line(f"  Not ours, and it holds the floor up too: {line}", "yellow")
        keep.kept = options.keep
        if keep.kept:
            _say_kept(console, directory, keep.services)
    return stage.outcome


def _in_memory() -> Path | None:
    """A tmpfs for the board: its /run and /sys are in memory too, so no write waits for a
    disk. (The daemon's fsync of what it found took 10 ms on one.) None: there is no tmpfs.
    """
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    tmpfs = {fields[1] for fields in map(str.split, mounts) if fields[2] == "tmpfs"}
    found = [path for path in ("/dev/shm", "/run", "/tmp") if path in tmpfs]
    return Path(found[0]) if found else None


def _models(cache: Path) -> tuple[Path, Path]:
    """The MoE model and its dense twin; MissingRequirement without gguf and numpy."""
    try:
        from moetuner.demo.model import ModelSpec, ensure
    except ModuleNotFoundError as error:
        raise MissingRequirement(
            f"the demonstration needs the Python package {error.name}",
            "install.sh --demo brings it; or: pip install gguf numpy",
        ) from error
    spec = ModelSpec()
    return ensure(spec, cache / "models"), ensure(spec.dense(), cache / "models")


class _Keep:
    """What runs, and whether it stays so at the end."""

    def __init__(self) -> None:
        self.kept = False
        self.services: list[Service] = []

    def add(self, service: Service) -> None:
        self.services.append(service)

    def stop(self) -> None:
        if not self.kept:
            for service in reversed(self.services):
                service.stop()


@dataclass(frozen=True)
class _Cast:
    """Who plays."""

    daemon: Daemon
    moe: LlamaServer
    dense: LlamaServer
    keep: _Keep


def _set_up(
    directory: Path,
    built: llamacpp.LlamaBuild,
    models: tuple[Path, Path],
    console: Console,
    stack: contextlib.ExitStack,
    keep: _Keep,
) -> tuple[Stage, _Cast, Recorder]:
    console.step("A simulated Orin Nano board")
    board = boards.create(directory / "board")
    console.line(f"  {board.root} (GPU {boards.NODE}, 306 to 1020 MHz)")
    stack.callback(keep.stop)
    keep.add(start_governor(board.root, directory / "governor.log"))
    journal = directory / "daemon.log"
    recorder = Recorder(board, journal)
    stack.callback(recorder.stop)
    recorder.start()
    witnessed = _witness(built.libllama, recorder, console, stack)
    console.step("The daemon")
    config = directory / "moetuner.yaml"
    config.write_text(CONFIGURATION)
    daemon = Daemon(board.root, config, journal)
    keep.add(daemon)
    console.line(f"  pid {daemon.pid}, ready; its journal: {journal}")
    console.step("Two real llama-servers, the MoE model with --cpu-moe, the dense one without")
    moe, dense = servers(built.server, *models, directory, keep.add)
    for server in (moe, dense):
        console.line(f"  pid {server.pid} on port {server.port}")
    if not recorder.wait_for_line(str(built.libllama), ATTACH_S):
        raise daemon.failure(f"did not find {built.libllama} in the running servers")
    # Loading ends with a warm-up call, which is inference too.
    if not recorder.wait_until_low(HOLD_S + 5):
        if foreign := others(recorder.since(0).journal, frozenset({moe.pid, dense.pid})):
            raise NotSo(
                f"another process on this machine holds the floor up: {foreign[-1]}",
                "the demonstration needs the machine to itself: end it and try again",
            )
        raise daemon.failure("left the floor up after the servers had started")
    stage = Stage(console, board, recorder, witnessed)
    return stage, _Cast(daemon, moe, dense, keep), recorder


def _witness(
    library: Path, recorder: Recorder, console: Console, stack: contextlib.ExitStack
) -> bool:
    """Whether the kernel records the calls for us; a machine without it can do with less."""
    witness = Witness(library, recorder.heard)
    try:
        witness.start()
    except MoetunerError as error:
        console.line(f"  {error}: delays after a call cannot be shown", "yellow")
        return False
    stack.callback(witness.stop)
    return True


def _play(stage: Stage, cast: _Cast, keep: bool) -> None:
    stage.idle(2.0)
    stage.requests(cast.moe, count=3, tokens=200)
    stage.long(cast.moe, seconds=3.0)
    stage.pair(cast.moe, tokens=200, gap_s=0.5)
    stage.raise_delay()
    stage.dense(cast.dense, tokens=1000)
    if keep:
        return
    stage.killed(cast.moe)
    again = cast.moe.restarted()
    cast.keep.add(again)
    again.await_ready()
    stage.daemon_ends(cast.daemon, again)


def _say_kept(console: Console, directory: Path, services: list[Service]) -> None:
    board = directory / "board"
    running = [service for service in services if service.running()]
    server = next(service for service in running if isinstance(service, LlamaServer))
    package = Path(__file__).parent.parent.parent
    console.line()
    console.step("Left running")
    for service in running:
        console.line(f"  pid {service.pid:<8} {service.name}; log {service.log}")
    url = f"http://127.0.0.1:{server.port}/completion"
    body = '{"prompt": "Hello", "n_predict": 500, "ignore_eos": true}'
    console.line(f"  ask:     curl {url} -d '{body}'")
    console.line(f"  watch:   tail -f {directory / 'daemon.log'}")
    python = f"PYTHONPATH={package} {sys.executable}"
    console.line(f"  status:  {python} -m moetuner status --root {board}")
    pids = " ".join(str(service.pid) for service in running)
    console.line(f"  stop:    kill {pids}; rm -r {directory}")


def _figures(outcome: Outcome) -> Iterator[tuple[str, float]]:
    if outcome.raises_s:
        yield "raise_ms_p50", round(statistics.median(outcome.raises_s) * 1000, 3)
        yield "raise_ms_max", round(max(outcome.raises_s) * 1000, 3)
    if outcome.falls_s:
        yield "return_s_p50", round(statistics.median(outcome.falls_s), 3)
    if outcome.tokens_per_second:
        yield "tokens_per_s_p50", round(statistics.median(outcome.tokens_per_second), 1)


def _summary(outcome: Outcome) -> dict[str, object]:
    return {
        "good": outcome.good,
        "checks": [asdict(check) for check in outcome.checks],
        "figures": dict(_figures(outcome)),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
    }


def _summarise(console: Console, outcome: Outcome, seconds: float) -> None:
    console.line()
    console.step("Summary")
    names = {
        "raise_ms_p50": ("first call → min_freq written, median", "ms"),
        "raise_ms_max": ("first call → min_freq written, longest", "ms"),
        "return_s_p50": ("last call → min_freq put back, median", "s"),
        "tokens_per_s_p50": ("decode speed of the small model, median", "tokens/s"),
    }
    for key, value in _figures(outcome):
        text, unit = names[key]
        console.line(f"  {text:<42} {value:>10g} {unit}")
    failed = [check for check in outcome.checks if not check.held]
    for check in failed:
        console.check(False, check.text)
    held = len(outcome.checks) - len(failed)
    console.line(
        f"  {held} of {len(outcome.checks)} checks held, in {duration(seconds)}",
        "green" if outcome.good else "red",
    )


if __name__ == "__main__":
    sys.exit(main())
