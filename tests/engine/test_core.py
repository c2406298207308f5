"""The expert cache's core: its own tests, plain and under the sanitizers.

./run-tests engine -k core, or -k "core and tsan and failures"

Builds of one checkout are kept in the cache directory and brought up to date by every
run, as Ninja sees fit: an unchanged tree costs a moment.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import cache_directory
from moetuner.serve.build import SOURCES as ENGINE
from moetuner.serve.build import alone
from tests.engine.rig import run_tool

PRESETS = ("release", "asan", "tsan")
# One ctest test per source file.
CASES = sorted(
    path.stem.replace("test_", "core.", 1) for path in (ENGINE / "tests/core").glob("test_*.cpp")
)
MINUTES = 60  # seconds


_run = partial(run_tool, limit_s=20 * MINUTES, directory=ENGINE)


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
            with alone(self._home / "lock"):
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
