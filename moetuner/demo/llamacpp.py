"""Builds llama.cpp once, unmodified and with shared libraries, in the user's cache.

    python3 -m moetuner.demo.llamacpp [--cache DIR] [--json]

The source is the one inside a pinned source distribution on the Python package
index. A build belongs to one processor (it is compiled for it) and one set of
options: both are part of its directory's name, so that a cache carried to another
machine is built anew there and not misused.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moetuner.demo.console import Console, duration
from moetuner.demo.sdist import Sdist, download, unpack
from moetuner.errors import MissingRequirement, MoetunerError, SystemRefused, reason

SDIST = Sdist(
    project="llama-cpp-python",
    version="0.3.36",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    backend="scikit_build_core.build",
)
COMMIT = "0c1e570"  # of the llama.cpp inside it
# Vocabularies, documents and CI recipes: 110 of 170 MB that no target reads.
SKIP = frozenset({".git", ".github", ".devops", "docs", "models", "media", "tests", "benches"})
TARGETS = (
    "llama-server",
    "llama-bench",
    "llama-completion",
    "llama-perplexity",
    "llama-gguf-split",
)
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # No network at build time: the web page would be downloaded, HTTPS needs OpenSSL.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    # The commit is known here; asking git could find a repository around the cache.
    f"-DLLAMA_BUILD_COMMIT={COMMIT}",
    "-DLLAMA_BUILD_NUMBER=0",
    "-DGIT_EXE=OFF",
)
# Some virtual machines announce AMX and then fault on its tile instructions: SIGILL in
# the first product of dense Q8_0 weights.
NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
BYTES_NEEDED = 700 << 20  # archive 75 MB, source 65 MB, build 250 MB, and room
BYTES_PER_JOB = 1536 << 20  # the largest translation units take about 1.2 GiB
FIRST_ESTIMATE = "about ten minutes on two cores"


@dataclass(frozen=True)
class LlamaBuild:
    """A built llama.cpp; every path exists."""

    bin: Path
    server: Path
    bench: Path
    completion: Path
    perplexity: Path
    gguf_split: Path
    libllama: Path
    source: Path
    build: Path
    commit: str


def cache_directory(given: str | os.PathLike[str] | None = None) -> Path:
    """`given`, else $XDG_CACHE_HOME/moetuner, else ~/.cache/moetuner; absolute, not created."""
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "moetuner"


def ensure(cache: Path | None = None, console: Console | None = None) -> LlamaBuild:
    """The build in `cache`, made first if it is not there. One process builds, others wait.

    An interrupted build goes on where it stopped. Raises MissingRequirement (tools,
    network, disk space) or SystemRefused (the compiler failed; names the log).
    """
    console = console or Console(sys.stderr)
    home = (cache or cache_directory()) / f"llama.cpp-{COMMIT}"
    build = home / f"build-{_fingerprint()}"
    if (build / "complete.json").is_file():
        return describe(build, home / "source")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemRefused(f"cannot make {home}: {reason(error)}", "give --cache DIR") from error
    with _locked(home / "lock", console):
        if not (build / "complete.json").is_file():
            _make(home, build, console)
    return describe(build, home / "source")


def describe(build: Path, source: Path | None = None) -> LlamaBuild:
    """What lies in an existing build directory of llama.cpp with shared libraries.

    `source` is read from its CMakeCache.txt if not given. Raises MissingRequirement
    naming the file that is not there.
    """
    binaries = build / "bin"
    paths = {target: binaries / target for target in TARGETS}
    paths["libllama"] = binaries / "libllama.so"
    for name, path in paths.items():
        if not path.is_file():
            raise MissingRequirement(
                f"{path} is not there",
                f"build llama.cpp there with -DBUILD_SHARED_LIBS=ON, target {name}",
            )
    return LlamaBuild(
        bin=binaries,
        server=paths["llama-server"],
        bench=paths["llama-bench"],
        completion=paths["llama-completion"],
        perplexity=paths["llama-perplexity"],
        gguf_split=paths["llama-gguf-split"],
        libllama=paths["libllama"].resolve(),
        source=source or _source_of(build),
        build=build,
        commit=COMMIT if source else "unknown",
    )


def _source_of(build: Path) -> Path:
    text = (build / "CMakeCache.txt").read_text(errors="replace")
    match = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", text, re.MULTILINE)
    if not match:
        raise MissingRequirement(f"{build}/CMakeCache.txt names no source tree")
    return Path(match[1])


def _fingerprint() -> str:
    """Eight hex digits of the options and of what -march=native depends on."""
    parts = (platform.machine(), *sorted(_cpu_features()), *OPTIONS, NO_TILES, *TARGETS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _cpu_features() -> frozenset[str]:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if match := re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE):
            return frozenset(match[1].split())
    return frozenset()


def _without_tiles() -> list[str]:
    """cmake options that leave AMX out, where there is one to leave out."""
    if "amx_tile" not in _cpu_features():
        return []
    for compiler in (os.environ.get("CC", "cc").split(), os.environ.get("CXX", "c++").split()):
        command = [*compiler, *NO_TILES.split(), "-fsyntax-only", "-x", "c", os.devnull]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
            return []
    return [f"-DCMAKE_C_FLAGS={NO_TILES}", f"-DCMAKE_CXX_FLAGS={NO_TILES}"]


@contextlib.contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Exclusive advisory lock; the kernel drops it when the holder dies."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            console.line(f"  another run (pid {holder}) is building llama.cpp: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _make(home: Path, build: Path, console: Console) -> None:
    began = time.monotonic()
    generator = _require_tools()
    free = shutil.disk_usage(home).free
    if free < BYTES_NEEDED and not build.is_dir():
        raise MissingRequirement(
            f"{home} has {free >> 20} MiB free, building llama.cpp takes {BYTES_NEEDED >> 20} MiB",
            "free some space or give --cache DIR on another disk",
        )
    source = home / "source"
    if not source.is_dir():
        console.line(f"  fetching {SDIST.project} {SDIST.version} (75 MB), the source of llama.cpp")
        archive = download(SDIST, home, show_progress=sys.stderr.isatty())
        unpack(archive, "vendor/llama.cpp", SKIP, source)
        archive.unlink()
    build.mkdir(exist_ok=True)
    log = build / "build.log"
    jobs = job_count(os.cpu_count() or 1, _available_memory())
    console.line(f"  compiling with {jobs} jobs ({FIRST_ESTIMATE}); log: {log}")
    command = ["cmake", "-S", str(source), "-B", str(build), "-G", generator, *OPTIONS]
    command += _without_tiles()
    if (code := _run(command, log, "wb")) != 0:
        raise _build_failed(log, code)
    code = _compile(build, generator, jobs, log, console)
    if code != 0 and jobs > 1 and _killed(log):
        console.line("  the compiler was killed, probably for memory: going on with one job")
        code = _compile(build, generator, 1, log, console)
    if code != 0:
        raise _build_failed(log, code)
    seconds = round(time.monotonic() - began, 1)
    facts = {"commit": COMMIT, "sdist": asdict(SDIST), "options": OPTIONS, "seconds": seconds}
    part = build / "complete.json.part"
    part.write_text(json.dumps(facts, indent=1) + "\n")
    part.rename(build / "complete.json")
    console.line(f"  llama.cpp {COMMIT} built in {duration(seconds)}")


def _require_tools() -> str:
    """The generator for cmake; MissingRequirement names every tool that is not there."""
    ninja, make = shutil.which("ninja"), shutil.which("make")
    missing = [name for name in ("cmake",) if not shutil.which(name)]
    compilers = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
    for variable, names in compilers.items():
        given = os.environ.get(variable)
        if not any(shutil.which(name) for name in ([given.split()[0]] if given else names)):
            missing.append(f"{given or names[0]} ({variable})")
    if not ninja and not make:
        missing.append("ninja or make")
    if missing:
        raise MissingRequirement(
            f"building llama.cpp needs {', '.join(missing)}",
            "apt-get install build-essential cmake ninja-build",
        )
    return "Ninja" if ninja else "Unix Makefiles"


def _available_memory() -> int:
    """MemAvailable in bytes; 0 if unknown."""
    with contextlib.suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
            return int(match[1]) * 1024
    return 0


def job_count(cores: int, available: int) -> int:
    """Compilers to run at once with `available` bytes of memory; at least one."""
    return max(1, min(cores, available // BYTES_PER_JOB))


def _run(command: list[str], log: Path, mode: str) -> int:
    with log.open(mode) as file:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        ).returncode


def _compile(build: Path, generator: str, jobs: int, log: Path, console: Console) -> int:
    """Runs the build; its output goes to `log`, its progress to the console."""
    # Not through `cmake --build`, which would not hand SIGTERM on.
    tool = "ninja" if generator == "Ninja" else "make"
    command = [tool, "-C", str(build), f"-j{jobs}", *TARGETS]
    began = time.monotonic()
    with (
        log.open("a", buffering=1) as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                if (fraction := progress_of(line)) is not None:
                    console.progress(fraction, remaining(fraction, time.monotonic() - began))
        except BaseException:
            process.terminate()  # ninja ends its compilers and keeps what is done
            raise
    return process.returncode


def progress_of(line: str) -> float | None:
    """0 to 1 from a line of ninja (`[12/222] …`) or make (`[ 12%] …`); None for others."""
    if match := re.match(r"\[(\d+)/(\d+)\]", line):
        return int(match[1]) / max(1, int(match[2]))
    if match := re.match(r"\[ *(\d+)%\]", line):
        return min(1.0, int(match[1]) / 100)
    return None


def remaining(fraction: float, elapsed: float) -> str:
    """`1:20 gone, about 6:10 left`; no estimate while it would be a guess."""
    text = f"{duration(elapsed)} gone"
    if fraction < 0.05 or elapsed < 10:
        return text
    return f"{text}, about {duration(elapsed * (1 - fraction) / fraction)} left"


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return file.read().decode("utf-8", "replace")


def _killed(log: Path) -> bool:
    return bool(re.search(r"Killed|signal 9|Cannot allocate memory", _tail(log)))


def _build_failed(log: Path, code: int) -> SystemRefused:
    text = _tail(log)
    if "No space left on device" in text:
        return SystemRefused(
            f"the disk became full while building llama.cpp (log: {log})",
            "free some space and run it again: it goes on where it stopped",
        )
    if _killed(log):
        return SystemRefused(
            f"the compiler was killed while building llama.cpp (log: {log})",
            f"free memory (one compiler takes up to {BYTES_PER_JOB >> 20} MiB) and run it again",
        )
    lines = re.findall(r"^.*(?:error|Error)\b.*$", text, re.MULTILINE)
    first = f": {lines[0].strip()[:200]}" if lines else ""
    return SystemRefused(f"building llama.cpp failed with status {code}{first}", f"log: {log}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m moetuner.demo.llamacpp",
        description="Build llama.cpp once in the cache directory and print where it is.",
        epilog="Example: python3 -m moetuner.demo.llamacpp --json",
    )
    parser.add_argument("--cache", metavar="DIR", help="default: $XDG_CACHE_HOME or ~/.cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        built = ensure(cache_directory(options.cache))
    except MoetunerError as error:
        print(f"moetuner: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nmoetuner: interrupted; the next run goes on where this stopped", file=sys.stderr)
        return 130
    facts = {name: str(value) for name, value in asdict(built).items()}
    if options.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:<11} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
