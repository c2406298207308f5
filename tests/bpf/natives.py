"""Builds the small programs of tests/bpf/native, each at most once per session."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
FUNCTIONS = ("decode", "process", "synchronize", "encode")
_LANGUAGE = {".c": "gcc", ".cpp": "g++"}


def total(function: str, calls: int) -> int:
    """What the driver answers to `call FUNCTION CALLS`: the sum of 10 x + number."""
    number = FUNCTIONS.index(function)
    return sum(10 * x + number for x in range(calls))


class Natives:
    """`directory` holds what was built; the same request gives the same file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._built: dict[tuple[str, ...], Path] = {}

    def library(self, source: str = "plain.cpp", *flags: str, strip: bool = False) -> Path:
        """A shared library, optimised with -O2 unless `flags` say otherwise."""
        return self._build((source, "-shared", "-fPIC", "-O2", *flags), strip)

    def small(self, *flags: str) -> Path:
        """A library with llama_decode alone: two probes, so that it is let go quickly."""
        return self.library("plain.cpp", "-DONE", *flags)

    @property
    def driver(self) -> Path:
        return self._build(("driver.cpp", "-O1", "-pthread", "-ldl"), False)

    def program(self, *flags: str, strip: bool = False) -> Path:
        """The driver with the functions in its own executable."""
        arguments = ("driver.cpp", str(SOURCES / "plain.cpp"), "-DLINKED", "-O2", "-pthread")
        return self._build((*arguments, *flags), strip)

    def _build(self, arguments: tuple[str, ...], strip: bool) -> Path:
        key = (*arguments, "stripped" if strip else "")
        if key not in self._built:
            source, *flags = arguments
            out = self._directory / f"{Path(source).stem}-{len(self._built)}"
            compiler = _LANGUAGE[Path(source).suffix]
            _run([compiler, *WARNINGS, str(SOURCES / source), "-o", str(out), *flags])
            if strip:
                _run(["strip", "--strip-all", str(out)])
            self._built[key] = out
        return self._built[key]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def copy(source: Path, destination: Path | str | bytes) -> None:
    """A file of its own (another inode), so that no other test's probes are in it."""
    shutil.copy(source, os.fsdecode(destination))
