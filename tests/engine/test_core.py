"""The expert cache's core: its own tests, plain and under the sanitizers.

./run-tests engine -k core, or -k "core and tsan and failures"

Builds of one checkout are kept in the cache directory and brought up to date by every
run, as Ninja sees fit: an unchanged tree costs a moment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import cache_directory

ENGINE = Path(__file__).parents[2] / "engine"
PRESETS = ("release", "asan", "tsan")
# One ctest test per source file.
CASES = sorted(
    path.stem.replace("test_", "core.", 1) for path in (ENGINE / "tests/core").glob("test_*.cpp")
)
MINUTES = 60  # seconds


def _run(*command: str | os.PathLike[str]) -> str:
    """Runs a command of the build in engine/; its output, which is the failure if it fails."""
    done = subprocess.run(
        command,
        cwd=ENGINE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=20 * MINUTES,
    )
    if done.returncode != 0:
        words = " ".join(os.fspath(word) for word in command)
        pytest.fail(f"{words}\n{done.stdout[-8000:]}", pytrace=False)
    return done.stdout


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process builds, others wait."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Builds:
    """`built(preset)` is an up-to-date build directory; made at most once per session."""

    def __init__(self) -> None:
        # Another checkout or another compiler: another directory.
        compiler = os.environ.get("CXX", "c++")
        version = _run(compiler, "--version")
        key = hashlib.sha256(f"{ENGINE.resolve()}\n{compiler}\n{version}".encode()).hexdigest()
        self._home = cache_directory() / f"engine-core-{key[:8]}"
        self._built: dict[str, Path] = {}

    def built(self, preset: str) -> Path:
        if preset not in self._built:
            directory = self._home / preset
            with _alone(self._home):
                _run("cmake", "-S", ".", "-G", "Ninja", "--preset", preset, "-B", directory)
                _run("cmake", "--build", directory)
            self._built[preset] = directory
        return self._built[preset]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return Builds()


def test_core_every_source_file_is_a_ctest_test(builds: Builds) -> None:
    listed = _run("ctest", "--test-dir", builds.built("release"), "-N", "-R", r"^core\.")
    assert CASES
    assert sorted(re.findall(r"Test +#\d+: (\S+)", listed)) == CASES


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preset", PRESETS)
def test_core(builds: Builds, preset: str, case: str) -> None:
    directory = builds.built(preset)
    name = f"^{case.replace('.', chr(92) + '.')}$"
    output = _run("ctest", "--test-dir", directory, "--output-on-failure", "-R", name)
    assert "100% tests passed, 0 tests failed out of 1" in output


def test_core_builds_without_liburing(builds: Builds, tmp_path: Path) -> None:
    options = ("-DMOETUNER_URING=OFF", "-DMOETUNER_BUILD_BENCH=OFF", "-DMOETUNER_BUILD_TESTS=OFF")
    told = _run("cmake", "-S", ".", "-G", "Ninja", "-B", tmp_path, *options)
    assert "threads only" in told
    _run("cmake", "--build", tmp_path)
