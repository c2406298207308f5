"""What the benchmarks share: native parts, a board in memory, the real daemon, the last line.

Run a benchmark as root: `sudo benchmarks/NAME`. Its last line is one JSON object
{"name": …, "figures": {key: number, …}, "machine": …, "date": …}.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetuner.demo import board as demo_board
from moetuner.errors import MissingRequirement, SystemRefused

REPOSITORY = Path(__file__).resolve().parent.parent
NATIVE = Path(__file__).resolve().parent / "native"
RAISED = str(demo_board.FREQUENCIES[-1])
START_TIMEOUT_S = 60


def say(text: str) -> None:
    """Progress, for people: standard error, so that the last line of output stays the result."""
    print(text, file=sys.stderr, flush=True)


def report(name: str, figures: dict[str, float]) -> None:
    """Prints the last line."""
    rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    print(json.dumps({"name": name, "figures": rounded, "machine": machine(), "date": date}))


def machine() -> str:
    """`x86_64, 2 × Intel …, Linux 6.18.44`"""
    model = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model += f", {len(os.sched_getaffinity(0))} × {line.partition(':')[2].strip()}"
                break
    return f"{model}, Linux {platform.release()}"


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` % of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


median = statistics.median


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A directory in memory (/run is a tmpfs on a board), removed at the end."""
    if os.geteuid() != 0:
        raise MissingRequirement("the benchmarks attach eBPF probes", "run with sudo")
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = Path(tempfile.mkdtemp(prefix="moetuner-bench-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Native:
    """Compiled: a library that is watched, one that is not, and the caller."""

    watched: Path
    plain: Path
    caller: Path


def compile_native(into: Path) -> Native:
    compiler = shutil.which("cc")
    if compiler is None:
        raise MissingRequirement("no C compiler", "apt-get install build-essential")

    def cc(output: str, source: str, *flags: str) -> Path:
        target = into / output
        subprocess.run(
            [compiler, "-O2", *flags, str(NATIVE / source), "-o", str(target)], check=True
        )
        return target

    shared = ("-shared", "-fPIC")
    return Native(
        cc("libllama.so", "probed.c", *shared, "-DPREFIX=llama_"),
        cc("libplain.so", "probed.c", *shared, "-DPREFIX=plain_"),
        cc("caller", "caller.c", "-ldl"),
    )


class Caller:
    """The caller process; each command answers with seconds."""

    def __init__(self, native: Native, *, watched: bool = True) -> None:
        library, symbol = (
            (native.watched, "llama_decode") if watched else (native.plain, "plain_decode")
        )
        self._process = subprocess.Popen(
            [str(native.caller), str(library), symbol, "--cpu-moe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __call__(self, command: str) -> float:
        """Sends a command and waits; SystemRefused when the caller gave up (see caller.c)."""
        self.start(command)
        return self.finish()

    def start(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def finish(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemRefused(f"the caller ended with status {self._process.wait()}")
        return int(line) / 1e9

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Daemon:
    """The real daemon on a simulated board in memory."""

    def __init__(self, directory: Path, settings: str) -> None:
        self.board = demo_board.create(directory / "board")
        self._config = directory / "moetuner.yaml"
        self._config.write_text(settings)
        self._log = directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, watched: Path) -> None:
        """Returns when the daemon has probes in `watched` (configure it in watch.libraries)."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "moetuner",
                    "daemon",
                    "--root",
                    str(self.board.root),
                    "--config",
                    str(self._config),
                ],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while f"watching {watched} " not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemRefused(f"the daemon did not start: {self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def wait_for(path: Path, prefix: str, timeout_s: float = 10.0) -> None:
    """Until the file begins with `prefix`; SystemRefused when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not path.read_text().startswith(prefix):
        if time.monotonic() > deadline:
            raise SystemRefused(f"{path} is still {path.read_text().strip()!r}, not {prefix!r}")
        time.sleep(0.005)
