"""The plugin and the program that writes logits: how they are built and run."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moetuner.demo.llamacpp import LlamaBuild, cache_directory
from moetuner.serve import build as engine_build
from moetuner.serve.build import BUFFER_TYPE, Plugin


@dataclass(frozen=True)
class Engine:
    """What was built. `environment` makes any program of `llama` find the plugin."""

    llama: LlamaBuild
    plugin: Plugin
    logits: Path
    router: Path
    operations: Path
    unit_tests: Path
    extra: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def environment(self, **settings: object) -> dict[str, str]:
        """`settings`: MOETUNER_<NAME>=value."""
        return {**self.extra, **self.plugin.environment(**settings)}


def build(llama: LlamaBuild) -> Engine:
    """The plugin and the test programs."""
    names = ("logits", "router", "operations", "backend_tests")
    programs = [f"moetuner_{name}" for name in names]
    plugin = built(llama, "tests", ("moetuner_experts", *programs), {})
    logits, router, operations, unit = (
        plugin.directory / "tests/backend" / name for name in programs
    )
    return Engine(llama, plugin, logits, router, operations, unit)


def build_sanitized(engine: Engine) -> Engine:
    """The plugin with AddressSanitizer and UndefinedBehaviorSanitizer, for the same programs.

    They have no sanitizer, so its library is preloaded: it sees all of their heap, but only
    the plugin's accesses.
    """
    options = {"MOETUNER_SANITIZE": "address,undefined", "MOETUNER_BUILD_TESTS": "OFF"}
    plugin = built(engine.llama, "asan", ("moetuner_experts",), options)
    compiler = os.environ.get("CXX", "c++")
    name = "libclang_rt.asan.so" if "clang" in compiler else "libasan.so"
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    extra = {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_stack_use_after_return=1"}
    return replace(engine, plugin=plugin, extra=extra)


def built(
    llama: LlamaBuild, kind: str, targets: Sequence[str], options: Mapping[str, str]
) -> Plugin:
    """Made once for each state of the sources, in the user's cache."""
    home = cache_directory()
    return engine_build.ensure(
        llama.source, llama.build, home, kind=kind, targets=targets, options=options
    )


def run_tool(
    *command: str | os.PathLike[str], limit_s: float, directory: Path | None = None
) -> str:
    """Runs a command of a build; its output, which is the failure if it fails."""
    done = subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
    )
    if done.returncode != 0:
        words = " ".join(os.fspath(word) for word in command)
        pytest.fail(f"{words}\n{done.stdout[-8000:]}", pytrace=False)
    return done.stdout


@dataclass(frozen=True)
class Result:
    """What a program wrote and how it ended. `logits`: one for each pair of model and output."""

    returncode: int
    log: str
    logits: tuple[bytes, ...] = ()

    def lines(self, *words: str) -> list[str]:
        """Lines of the log with all the words."""
        return [line for line in self.log.splitlines() if all(word in line for word in words)]

    def splits(self) -> str:
        """How many pieces the scheduler cuts graphs into, as llama.cpp says it."""
        (found,) = set(re.findall(r"nodes = \d+, (splits = \d+)", self.log))
        return str(found)


def run_program(
    command: Sequence[str | Path],
    environment: Mapping[str, str] = {},
    *,
    limit_s: float = 120,
    stderr: int = subprocess.STDOUT,
    text: str = "",
) -> Result:
    """Runs it to its end; standard error and output are one log. `text`: its input."""
    done = subprocess.run(
        [str(word) for word in command],
        env=full_environment(environment),
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=limit_s,
    )
    return Result(done.returncode, done.stdout.decode("utf-8", "replace"))


def full_environment(chosen: Mapping[str, str]) -> dict[str, str]:
    """`chosen` and what of this process's environment does not change results."""
    foreign = ("MOETUNER_", "GGML_", "LLAMA_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # Waiting threads sleep: the tests share their cores with others.
    return {**plain, "OMP_WAIT_POLICY": "passive", **chosen}


@dataclass
class Logits:
    """Runs moetuner_logits and remembers what stock gave."""

    engine: Engine
    directory: Path
    _stock: dict[tuple[object, ...], Result] = field(default_factory=dict)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        models: Sequence[Path],
        arguments: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Result:
        """One output for each model. With `environment` experts go through the plugin.

        `prefix`: a command that runs the program under other conditions.
        """
        outputs = [self.directory / f"{next(self._count)}.logits" for _ in models]
        command: list[str | Path] = [*prefix, self.engine.logits, *map(str, arguments)]
        if environment is not None:
            command += ["--experts", BUFFER_TYPE]
        command += [word for pair in zip(models, outputs, strict=True) for word in pair]
        done = run_program(command, environment or {})
        logits = tuple(path.read_bytes() for path in outputs if path.exists())
        for path in outputs:
            path.unlink(missing_ok=True)
        return Result(done.returncode, done.log, logits)

    def stock(self, models: Sequence[Path], arguments: Sequence[object] = ()) -> Result:
        """The same without the plugin; must work."""
        key = (*models, "", *arguments)
        if key not in self._stock:
            result = self.run(models, arguments)
            assert result.returncode == 0, result.log
            self._stock[key] = result
        return self._stock[key]

    def assert_equal(
        self,
        models: Sequence[Path],
        arguments: Sequence[object] = (),
        *,
        stock: Sequence[object] | None = None,
        originals: Sequence[Path] | None = None,
        prefix: Sequence[str] = (),
        **settings: object,
    ) -> Result:
        """The plugin's logits are stock's, bit for bit, and the cache had a part in them.

        `stock`, `originals`: arguments and models for stock if they are others.
        `settings`: MOETUNER_<NAME>.
        """
        got = self.run(models, arguments, self.engine.environment(**settings), prefix)
        assert got.returncode == 0, got.log
        assert got.lines("moetuner: expert cache for"), got.log
        want = self.stock(originals or models, arguments if stock is None else stock)
        assert all(want.logits) and len(got.logits) == len(models)
        for index, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
            assert ours == theirs, f"output {index}: {_first_difference(ours, theirs)}\n{got.log}"
        return got


def _first_difference(ours: bytes, theirs: bytes) -> str:
    pairs = enumerate(zip(memoryview(ours).cast("f"), memoryview(theirs).cast("f"), strict=False))
    for index, (a, b) in pairs:
        if a != b:
            return f"value {index} is {a!r}, stock's {b!r}"
    return f"{len(ours)} bytes, stock's {len(theirs)}"


def covering(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two dimensions occurs together; deterministic.

    Greedy: about as many rows as the two largest dimensions have pairs.
    """
    names = list(dimensions)
    pairs = {
        ((a, x), (b, y)): None
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(dimensions[a], dimensions[b])
    }
    rows = []
    while pairs:
        row = dict(next(iter(pairs)))
        for name in names:
            if name in row:
                continue

            def gain(value: Any, name: str = name, row: dict[str, Any] = row) -> int:
                return sum(_pair(names, name, value, other, row[other]) in pairs for other in row)

            row[name] = max(dimensions[name], key=gain)
        for a, b in itertools.combinations(names, 2):
            pairs.pop(((a, row[a]), (b, row[b])), None)
        rows.append({name: row[name] for name in names})
    return rows


def _pair(names: Sequence[str], a: str, x: Any, b: str, y: Any) -> tuple[Any, Any]:
    return ((a, x), (b, y)) if names.index(a) < names.index(b) else ((b, y), (a, x))
