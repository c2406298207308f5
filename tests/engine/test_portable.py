"""Other compilers and another processor: all warnings are errors, and the core's tests pass.

Boards have gcc 11 (Ubuntu 22.04) and are aarch64. A compiler that this machine has no
package of is a reason to skip.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from functools import partial

import pytest

from moetuner.demo.llamacpp import LlamaBuild
from moetuner.serve.build import SOURCES as ENGINE
from tests.engine.rig import built, run_tool
from tests.support.machine import cannot

CROSS = "aarch64-linux-gnu"
# The emulator says that no file can be read directly, and takes neither seccomp filters nor
# limits of locked memory: beginnings of names of test cases.
NOT_EMULATED = (
    "every reader brings",
    "the operation that runs now",
    "a single EIO",
    "an arena is locked",
    "no direct reads at all",
    "a trace that cannot be had",
    "without a page everything",
    "io_uring forbidden",
)


_run = partial(run_tool, limit_s=600)


def _need(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            cannot(f"it has no {program}")


@pytest.mark.parametrize("version", ["11", "12"])
def test_gcc(llama: LlamaBuild, version: str) -> None:
    """The core and the plugin, optimised: some warnings come only then."""
    _need(f"g++-{version}")
    own = _run(os.environ.get("CXX", "c++"), "-dumpversion").partition(".")[0].strip()
    if own == version:
        cannot(f"its own compiler is gcc {own}, with which everything else is built")
    _plugin(llama, f"gcc-{version}", f"g++-{version}")


def test_clang(llama: LlamaBuild) -> None:
    found = [f"clang++{suffix}" for suffix in ("", "-14", "-15", "-16", "-17", "-18", "-19")]
    compiler = next((name for name in found if shutil.which(name)), None)
    if compiler is None:
        cannot("it has no clang")
    _plugin(llama, compiler.replace("++", ""), compiler)


def _plugin(llama: LlamaBuild, c: str, cxx: str) -> None:
    options = {
        "CMAKE_C_COMPILER": c,
        "CMAKE_CXX_COMPILER": cxx,
        "MOETUNER_BUILD_TESTS": "OFF",
    }
    assert built(llama, c, ("moetuner_experts",), options).path.exists()


@pytest.fixture(scope="module")
def cross_compiler() -> str:
    if platform.machine() == "aarch64":
        cannot("it is aarch64 itself: all other tests are its")
    _need(f"{CROSS}-g++", "qemu-aarch64")
    return f"{CROSS}-g++"


def test_core_on_aarch64(cross_compiler: str, llama: LlamaBuild) -> None:
    """Its tests pass in an emulator, without io_uring, which that has none of."""
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": f"{CROSS}-gcc",
        "CMAKE_CXX_COMPILER": cross_compiler,
        "MOETUNER_URING": "OFF",
        "LLAMA_CPP_DIR": "",
    }
    directory = built(llama, "aarch64", ("moetuner_core_tests",), options).directory
    program = directory / "tests/core/moetuner_core_tests"
    excluded = "-tce=" + ",".join(f"{name}*" for name in NOT_EMULATED)
    output = _run("qemu-aarch64", "-L", f"/usr/{CROSS}", program, excluded)
    found = re.search(r"test cases: +(\d+) \| +(\d+) passed \| 0 failed \| (\d+) skipped", output)
    assert found and int(found[1]) > 80 and int(found[3]) == len(NOT_EMULATED), output


def test_the_rest_compiles_for_aarch64(cross_compiler: str, llama: LlamaBuild) -> None:
    """io_uring and the plugin: their sources, against headers that are the same everywhere."""
    ggml = llama.source / "ggml"
    command = [cross_compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic"]
    command += ["-Wconversion", "-Wshadow", "-Werror", "-DMOETUNER_HAVE_URING"]
    command += ['-DMOETUNER_GGML_COMMIT="0"', "-DGGML_SHARED", "-DGGML_BACKEND_SHARED"]
    if (ggml / "src/ggml-cpu/tiled/tiled.h").exists():
        command.append("-DMOETUNER_TILED")
    command += [f"-I{ENGINE / 'src'}", "-isystem", str(ggml / "include")]
    command += ["-isystem", str(ggml / "src"), "-idirafter", "/usr/include"]
    sources = [*sorted((ENGINE / "src/ggml").glob("*.cpp")), ENGINE / "src/io/uring_reader.cpp"]
    for source in sources:
        _run(*command, source)
