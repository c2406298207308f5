"""Products of every type and shape that llama.cpp's own test of operations has.

That program, test-backend-ops, gives weights names and memory of its own choice, and such
products the plugin leaves alone: it shows that nothing else is taken. The same cases as
experts in a file are computed by moetuner_operations.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import SDIST, LlamaBuild, cache_directory
from moetuner.demo.sdist import download, unpack
from moetuner.serve.build import BUFFER_TYPE, alone
from tests.engine.rig import Engine, run_program

# Most cases have at most a million weights; the few beyond add no other shape.
LARGEST = 4_000_000
SOURCE = "test-backend-ops.cpp"


@pytest.fixture(scope="session")
def backend_ops(llama: LlamaBuild) -> Path:
    """Built against the libraries of `llama`, from the archive that they come from; once."""
    home = cache_directory() / f"backend-ops-{llama.commit}-{llama.build.name}"
    program = home / "test-backend-ops"
    with alone(home / "lock"):
        if not program.exists():
            if not (home / "tests" / SOURCE).exists():
                archive = download(SDIST, home)
                unpack(archive, "vendor/llama.cpp/tests", frozenset(), home / "tests")
                archive.unlink()
            _compile(llama, home / "tests" / SOURCE, program)
    return program


def _compile(llama: LlamaBuild, source: Path, program: Path) -> None:
    part = program.with_suffix(".part")
    include = [f"-I{llama.source / 'ggml' / name}" for name in ("include", "src")]
    # -O1: it is compiled more often than it runs long.
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", *include, str(source)]
    command += ["-o", str(part), f"-L{llama.bin}", f"-Wl,-rpath,{llama.bin}"]
    command += ["-lggml", "-lggml-base", "-lggml-cpu", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    part.rename(program)


def test_backend_ops(engine: Engine, backend_ops: Path) -> None:
    """All operations: those that the device takes are right; no crash, none taken by mistake."""
    command: list[str | Path] = [backend_ops, "test", "-b", BUFFER_TYPE]
    result = run_program(command, engine.environment(cache_mib=64), limit_s=300)
    assert result.returncode == 0, result.log[-4000:]
    assert re.search(r"(\d+)/\1 tests passed", result.log)
    assert "FAIL" not in result.log
    # Without a file there are no experts.
    assert result.lines("MUL_MAT_ID(type_a=q4_K", "not supported")


@pytest.fixture(scope="session")
def cases(engine: Engine, backend_ops: Path) -> str:
    """Of the products of experts, as moetuner_operations reads them."""
    command: list[str | Path] = [backend_ops, "support", "-b", "CPU"]
    command += ["-o", "MUL_MAT_ID", "--output", "csv"]
    result = run_program(command)
    assert result.returncode == 0, result.log
    lines = []
    for row in csv.DictReader(result.log[result.log.index('"backend_name"') :].splitlines()):
        found = dict(re.findall(r"(\w+)=([^,]+)", row["op_params"]))
        names = ("n_mats", "n_used", "b", "m", "n", "k")
        experts, used, broadcast, rows, tokens, columns = (int(found[name]) for name in names)
        if row["op_name"] == "MUL_MAT_ID" and experts * rows * columns <= LARGEST:
            words = (found["type_a"], experts, used, broadcast, rows, tokens, columns)
            lines.append(" ".join(map(str, words)))
    assert len(lines) > 800
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("cache_mib", "threads"), [(1, 2), (64, 3)])
def test_operations_are_equal(engine: Engine, cases: str, cache_mib: int, threads: int) -> None:
    types = {line.split()[0] for line in cases.splitlines()}
    wanted = "f16 bf16 q8_0 q4_0 q4_K q5_K q6_K iq4_nl iq4_xs mxfp4 nvfp4 q2_K q3_K iq2_xxs"
    assert set(wanted.split()) <= types
    command: list[str | Path] = [engine.operations, "--threads", str(threads)]
    result = run_program(command, engine.environment(cache_mib=cache_mib), text=cases)
    assert result.returncode == 0, result.log[-4000:]
    assert result.lines(f"{len(cases.splitlines())} cases equal, 0 without room")
