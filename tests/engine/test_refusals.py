"""What the plugin refuses, and what is left then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moetuner.serve.build import OVERRIDE
from tests.engine.rig import Engine, Logits, Result, run_program

Model = Callable[[str], Path]


def _complete(engine: Engine, model: Path, *arguments: str, **environment: str) -> Result:
    command: list[str | Path] = [engine.llama.completion, "-m", model, "-p", "Hello", "-n", "4"]
    command += ["--temp", "0", "-no-cnv", "-t", "2", "--no-repack", "--no-warmup", *arguments]
    # llama.cpp, stock too, drops the end of its log in some of its runs, with status 0: such a
    # run is repeated. These are its last words.
    for _ in range(10):
        result = run_program(command, environment)
        if result.returncode != 0 or result.lines("graphs reused"):
            return result
    raise AssertionError(f"never a whole log\n{result.log}")


@pytest.fixture(scope="module")
def foreign_plugin(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if it had been built from other sources."""
    path = tmp_path_factory.mktemp("foreign") / "libmoetuner-experts.so"
    data = engine.plugin.path.read_bytes()
    assert data.count(b"\0" + engine.llama.commit.encode() + b"\0") == 1
    path.write_bytes(data.replace(engine.llama.commit.encode(), b"badc0de"))
    return path


def test_another_commit_is_named(engine: Engine, model: Model, foreign_plugin: Path) -> None:
    result = _complete(engine, model("Q8_0"), *OVERRIDE, GGML_BACKEND_PATH=str(foreign_plugin))
    (line,) = result.lines("moetuner: built for ggml")
    assert "badc0de" in line and engine.llama.commit in line
    # The pattern names a buffer type that is not there: the program does not start.
    assert result.returncode == 1
    assert result.lines("unknown buffer type")


def test_without_the_pattern_the_program_runs_as_ever(
    engine: Engine, model: Model, foreign_plugin: Path
) -> None:
    arguments = ["-p", "8", "-n", "4", "-r", "1", "-t", "2"]
    result = run_program(
        [engine.llama.bench, "-m", model("Q8_0"), *arguments],
        {"GGML_BACKEND_PATH": str(foreign_plugin)},
    )
    assert result.lines("moetuner: built for ggml"), result.log
    assert result.returncode == 0
    assert result.lines("tg4"), result.log


def test_a_plugin_that_is_not_there(engine: Engine, model: Model, tmp_path: Path) -> None:
    result = _complete(
        engine, model("Q8_0"), *OVERRIDE, GGML_BACKEND_PATH=str(tmp_path / "nothing.so")
    )
    assert result.returncode == 1
    assert result.lines("nothing.so")
    assert result.lines("unknown buffer type")


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("CACHE_MIB", "4x", "whole number of MiB from 1"),
        ("CACHE_MIB", "0", "whole number of MiB from 1"),
        ("CACHE_MIB", "-1", "whole number of MiB from 1"),
        ("CACHE_MIB", " 8", "whole number of MiB from 1"),
        ("CACHE_MIB", "99999999999999999999999", "whole number of MiB from 1"),
        ("IO", "URING", "auto, uring or pool"),
        ("IO_DEPTH", "0", "whole number of reads from 1 to 1024"),
        ("IO_THREADS", "8.0", "whole number of threads from 1"),
        ("PIECE_KIB", "2", "whole number of KiB from 4"),
        ("LOCK", "yes", "1 or 0"),
        ("DIRECT", "2", "1 or 0"),
        ("RESIDENT", "true", "1 or 0"),
        ("HUGEPAGES", "on", "1 or 0"),
        ("SPIN_US", "1e3", "whole number of µs from 0"),
    ],
)
def test_bad_values(logits: Logits, model: Model, name: str, value: str, takes: str) -> None:
    environment = {**logits.engine.environment(), f"MOETUNER_{name}": value}
    result = logits.run([model("Q8_0")], (), environment)
    assert result.returncode == 1
    (line,) = result.lines(f"moetuner: MOETUNER_{name}={value}: it takes")
    assert takes in line and line.endswith(": not used")


def test_an_empty_value_counts_as_none(logits: Logits, model: Model) -> None:
    logits.assert_equal([model("Q8_0")], cache_mib="", io="", lock="", tensors="", hot_list="")


def test_without_a_budget_it_says_what_it_took(logits: Logits, model: Model) -> None:
    got = logits.assert_equal([model("Q8_0")])
    assert got.lines("16 of 16 units", "MOETUNER_CACHE_MIB is not set"), got.log


def test_a_budget_below_one_expert(logits: Logits, model: Model, tmp_path: Path) -> None:
    from moetuner.demo.model import ModelSpec, ensure

    large = ensure(ModelSpec(layers=1, feed_forward=2048), tmp_path)
    environment = logits.engine.environment(cache_mib=1)
    result = logits.run([large], (), environment)
    assert result.returncode == 1
    assert result.lines("moetuner: MOETUNER_CACHE_MIB=1: a budget of 1048576 bytes"), result.log
    assert result.lines("no context"), result.log


def test_a_cache_that_nothing_uses_is_told(engine: Engine, model: Model) -> None:
    environment = engine.environment(cache_mib=4, tensors="no such matrix")
    result = _complete(engine, model("Q8_0"), *OVERRIDE, **environment)
    assert result.returncode == 0
    assert len(result.lines("moetuner: a cache was asked for", "nothing is cached")) == 1


def test_patterns_for_the_cpu_mean_the_plugin_too(engine: Engine, model: Model) -> None:
    """llama.cpp takes the first of its CPU buffer types, and an accelerator's come first."""
    pattern = ("-ot", "exps=CPU", "--log-verbosity", "4")
    result = _complete(engine, model("Q8_0"), *pattern, **engine.environment(cache_mib=4))
    assert result.returncode == 0
    assert result.lines("moetuner: expert cache for"), result.log


@pytest.mark.parametrize("cache", [{"cache_mib": 4}, {}])
def test_a_dense_model_is_left_alone(
    engine: Engine, dense_model: Path, cache: dict[str, object]
) -> None:
    log = ("--log-verbosity", "4")
    stock = _complete(engine, dense_model, *log)
    ours = _complete(engine, dense_model, *log, *OVERRIDE, **engine.environment(**cache))
    assert ours.returncode == 0, ours.log
    assert ours.lines("loaded MOETUNER backend")
    assert ours.splits() == stock.splits() == "splits = 1"
    assert not ours.lines("moetuner: expert cache")
    assert not ours.lines("MOETUNER model buffer")
    assert len(ours.lines("nothing is cached")) == len(cache)


def test_splits_of_a_graph(logits: Logits, model: Model) -> None:
    """One for each layer with experts, and one around each: nothing else cuts the graph."""
    for name, layers in (("Q8_0", 2), ("gpt-oss", 2), ("hy_v3", 2), ("olmoe", 2)):
        got = logits.assert_equal([model(name)], cache_mib=2)
        assert got.splits() == f"splits = {2 * layers + 1}", name


def test_unlocked_memory_is_told(logits: Logits, model: Model) -> None:
    """A user with no right to lock memory gets the same logits, and warnings."""
    limited = ["prlimit", "--memlock=0:0"]
    if os.geteuid() == 0:
        limited = ["setpriv", "--bounding-set=-ipc_lock", *limited]
    got = logits.assert_equal([model("Q8_0")], cache_mib=2, prefix=limited)
    assert got.lines("of dense weights are locked", "RLIMIT_MEMLOCK"), got.log
    assert got.lines("of the cache are locked", "RLIMIT_MEMLOCK"), got.log
    unasked = logits.assert_equal([model("Q8_0")], cache_mib=2, lock=0, prefix=limited)
    assert not unasked.lines("RLIMIT_MEMLOCK")


@pytest.mark.parametrize(("cache_mib", "warnings"), [(1, 1), (4, 0)])
def test_a_cache_smaller_than_one_token_is_told(
    logits: Logits, model: Model, cache_mib: int, warnings: int
) -> None:
    """Two layers use three experts each."""
    got = logits.assert_equal([model("Q8_0")], cache_mib=cache_mib)
    assert len(got.lines("moetuner: the cache holds 2 experts, but one token uses 6")) == warnings
