"""Memory that is refused: a clear end, or the right answer with less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetuner.demo.limits import drop_page_cache, memory_limit
from moetuner.demo.llamacpp import cache_directory
from moetuner.demo.model import ModelSpec, ensure
from tests.engine.rig import Logits, Result

ARGUMENTS = ("--batches", "64")
# Steps below the size of the cache: one of them has room for llama.cpp, but not for it.
CACHE_MIB, STEP_MIB = 64, 12


@pytest.fixture(scope="module")
def large() -> Path:
    """64 MiB of experts in 32 units."""
    spec = ModelSpec(layers=2, experts=16, experts_used=3, feed_forward=2560)
    return ensure(spec, cache_directory() / "models")


@pytest.mark.parametrize("io", ["uring", "pool"])
def test_address_space_of_any_size(logits: Logits, large: Path, io: str) -> None:
    """Whatever is refused first: the arena, a thread, the reader's rings, a scratch buffer."""
    (stock,) = logits.stock([large], ARGUMENTS).logits
    environment = logits.engine.environment(cache_mib=CACHE_MIB, io=io, io_threads=4)
    refusals, successes = [], 0
    for limit in range(100, 420, STEP_MIB):
        prefix = ["prlimit", f"--as={limit << 20}"]
        got = logits.run([large], ARGUMENTS, environment, prefix)
        if got.returncode == 0:
            assert got.logits == (stock,), limit
            successes += 1
            continue
        said = got.lines("moetuner: no ") + got.lines("moetuner: cannot ")
        if not said:  # then it was llama.cpp that had too little
            assert logits.run([large], ARGUMENTS, prefix=prefix).returncode != 0, got.log
            continue
        assert got.returncode == 1, got.log
        assert got.lines("moetuner_logits: llama_decode gave -"), got.log
        assert all(stock.startswith(part) for part in got.logits)
        refusals += said
    assert successes > 3
    assert any("for a cache of" in line for line in refusals), refusals


def _in_control_group(logits: Logits, large: Path, mib: int, **settings: object) -> Result:
    """Memory for the program, its cache and what the page cache holds of the model."""
    drop_page_cache(large)
    with memory_limit(f"moetuner-engine-{os.getpid()}", mib << 20) as limited:
        environment = logits.engine.environment(**settings)
        return logits.run([large], ARGUMENTS, environment, limited.prefix)


TOO_MUCH = ("are more than the free memory of",)


@pytest.mark.root
@pytest.mark.parametrize("settings", [{"cache_mib": 24}, {}, {"cache_mib": 24, "lock": 0}])
def test_a_control_group_with_room(
    logits: Logits, large: Path, settings: dict[str, object]
) -> None:
    """The model has none; the cache has, also if it chooses its size itself."""
    got = _in_control_group(logits, large, 96, **settings)
    assert got.returncode == 0, got.log
    assert got.logits == logits.stock([large], ARGUMENTS).logits
    assert not got.lines(*TOO_MUCH)
    (line,) = got.lines("moetuner: expert cache for")
    assert "32 of 32 units" not in line


@pytest.mark.root
def test_a_control_group_without_room_is_told(logits: Logits, large: Path) -> None:
    """If the kernel ends the program then, the reason is the last that it said."""
    got = _in_control_group(logits, large, 60, cache_mib=CACHE_MIB)
    assert len(got.lines(*TOO_MUCH)) == 1, got.log
    (stock,) = logits.stock([large], ARGUMENTS).logits
    assert all(stock.startswith(part) for part in got.logits)
