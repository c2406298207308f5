"""Builds the expert cache against a built llama.cpp, once for each pair of the two.

The plugin holds the commit it was built for and refuses any other, so a build belongs to
one build directory of llama.cpp. It is kept under the hash of everything it is made of.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetuner.errors import MissingRequirement, SystemRefused, reason

# The sources: in a checkout beside the package.
SOURCES = Path(__file__).parents[2] / "engine"
BUFFER_TYPE = "MOETUNER"
# llama.cpp's own pattern of `--cpu-moe` (common/common.h), with our buffer type.
OVERRIDE = ("-ot", rf"\.ffn_(up|down|gate|gate_up)_(ch|)exps={BUFFER_TYPE}")
PLUGIN = "src/ggml/libmoetuner-experts.so"  # below a build directory
TARGETS = ("moetuner_experts",)
BASE = {"CMAKE_BUILD_TYPE": "Release", "MOETUNER_BUILD_BENCH": "OFF"}  # of all builds
NO_TESTS = {"MOETUNER_BUILD_TESTS": "OFF"}
KEPT = 3  # builds of one kind; the least recently used go


@dataclass(frozen=True)
class Plugin:
    """A built plugin; `directory` is the build directory."""

    path: Path
    directory: Path

    def environment(self, **settings: object) -> dict[str, str]:
        """What makes llama.cpp load it. `settings`: MOETUNER_<NAME>=value."""
        chosen = {f"MOETUNER_{name.upper()}": str(value) for name, value in settings.items()}
        return {"GGML_BACKEND_PATH": str(self.path), **chosen}


def ensure(
    llama_source: Path,
    llama_build: Path,
    home: Path,
    *,
    sources: Path = SOURCES,
    kind: str = "plugin",
    targets: Sequence[str] = TARGETS,
    options: Mapping[str, str] = NO_TESTS,
) -> Plugin:
    """The plugin for that llama.cpp, compiled below `home` first if it is not there.

    `kind`: part of the directory's name; one kind has always the same targets and options (for
    cmake, beside those that all builds have). One process builds, others wait; about 40 seconds
    on two cores. MissingRequirement: no sources, no cmake; SystemRefused: the compiler failed
    (names the log).
    """
    name = f"engine-{kind}"
    try:
        parts = (llama_build, os.environ.get("CXX"), *_contents(sources, options))
        directory = home / f"{name}-{_digest(parts)[:10]}"
        with alone(home / f"{name}.lock"):
            if not (directory / "complete").exists():
                _compile(sources, llama_source, llama_build, directory, targets, options)
                (directory / "complete").touch()
            os.utime(directory)
            _drop_old(home, name)
    except OSError as error:
        raise SystemRefused(f"cannot build in {home}: {reason(error)}") from error
    return Plugin(directory / PLUGIN, directory)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time, others wait. Makes the lock's directory."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _contents(sources: Path, options: Mapping[str, str]) -> list[bytes]:
    """Names and bytes of the sources, but of parts that are switched off."""
    if not (sources / "CMakeLists.txt").is_file():
        raise MissingRequirement(
            f"the expert cache's sources are not in {sources}", "run this from a checkout"
        )
    given = {**BASE, **options}
    off = {
        part for part in ("tests", "bench") if given.get(f"MOETUNER_BUILD_{part.upper()}") == "OFF"
    }
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    places = [(path.relative_to(sources), path) for path in files]
    return [
        str(place).encode() + b"\0" + path.read_bytes()
        for place, path in places
        if place.parts[0] not in off
    ]


def _digest(parts: Sequence[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _compile(
    sources: Path,
    llama_source: Path,
    llama_build: Path,
    directory: Path,
    targets: Sequence[str],
    options: Mapping[str, str],
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise MissingRequirement("cmake is not installed", "apt-get install cmake ninja-build g++")
    given = {
        **BASE,
        "LLAMA_CPP_DIR": str(llama_source),
        "LLAMA_CPP_BUILD": str(llama_build),
        **options,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(sources), "-B", str(directory), *generator]
    configure += [f"-D{name}={value}" for name, value in given.items()]
    jobs = str(len(os.sched_getaffinity(0)))
    make = [cmake, "--build", str(directory), "-j", jobs, "--target", *targets]
    directory.mkdir(exist_ok=True)
    log = directory / "build.log"
    with log.open("wb") as output:
        for command in (configure, make):
            if subprocess.run(command, stdout=output, stderr=output).returncode != 0:
                lines = log.read_text(errors="replace").strip().splitlines()
                told = next((line for line in lines if "error" in line.lower()), lines[-1])
                raise SystemRefused(f"building the expert cache failed: {told}", f"see {log}")


def _drop_old(home: Path, name: str) -> None:
    builds = [path for path in home.glob(f"{name}-*") if path.is_dir()]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)
