"""Logits through the expert cache are stock's, bit for bit."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import MODELS
from tests.engine.families import FAMILIES
from tests.engine.rig import Engine, Logits, covering, run_program

Model = Callable[[str], Path]

# All numbers of rows around which kernels change; 512 as a batch of its own.
BATCHES = ("1,2,7,8,31,64", "512")
# An expert takes a little less than half a MiB: two units (fewer than a token uses), four
# (fewer than a batch uses), nine (a layer's and one more), everything.
CACHE_MIB = (1, 2, 4, 64)


def _name(row: dict[str, object]) -> str:
    return "-".join(str(value) for value in row.values()).replace(",", ".")


ROWS = covering(
    {
        "model": (*MODELS, *FAMILIES),
        "threads": (1, 2, 3, 8),
        "cache_mib": CACHE_MIB,
        "batches": BATCHES,
        "load": ("mmap", "none", "dio"),
        "io": ("auto", "pool"),
        "piece_kib": (4, 40, 128, 4096),
        "direct": (1, 0),
    }
)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_logits_are_equal(logits: Logits, model: Model, row: dict[str, object]) -> None:
    arguments = ["--batches", row["batches"], "--threads", row["threads"], "--decode", 6]
    path = model(str(row["model"]))
    got = logits.assert_equal(
        [path],
        [*arguments, "--load-mode", row["load"]],
        stock=arguments,
        cache_mib=row["cache_mib"],
        io=row["io"],
        piece_kib=row["piece_kib"],
        direct=row["direct"],
    )
    # A read to the wrong place in memory is refused, and done through the page cache.
    assert not got.lines("direct reads of") or not _can_be_read_directly(path), got.log


def _can_be_read_directly(path: Path) -> bool:
    """Whether the file system has O_DIRECT."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, 4096)], 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize("threads", [4, 5, 6, 7])
@pytest.mark.parametrize("name", ["mixed", "olmoe"])
def test_other_numbers_of_threads(logits: Logits, model: Model, name: str, threads: int) -> None:
    arguments = ["--batches", BATCHES[0], "--threads", threads]
    logits.assert_equal([model(name)], arguments, cache_mib=2)


def test_units(engine: Engine) -> None:
    """The plugin's functions that need no ggml."""
    result = run_program([engine.unit_tests])
    assert result.returncode == 0, result.log
    assert result.lines("test cases:", "0 failed"), result.log
