"""Memory that is refused: a clear end, or the right answer with less."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetuner.demo.llamacpp import cache_directory
from moetuner.demo.model import ModelSpec, ensure
from tests.engine.rig import Logits

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
