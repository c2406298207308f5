"""How models get into the cache: load modes, split files, several models, adapters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import cache_directory
from moetuner.demo.model import ModelSpec, ensure
from tests.engine.conftest import MODELS
from tests.engine.lora import write_lora
from tests.engine.rig import Engine, Logits, run_program

Model = Callable[[str], Path]


@pytest.mark.parametrize("mode", ["mmap", "none", "dio", "mlock", "mmap+mlock"])
@pytest.mark.parametrize("name", ["gpt-oss", "mixed"])
def test_check_tensors_in_every_load_mode(
    logits: Logits, model: Model, mode: str, name: str
) -> None:
    logits.assert_equal(
        [model(name)], ["--load-mode", mode, "--check-tensors"], stock=(), cache_mib=2
    )


@pytest.mark.parametrize("mode", ["none", "dio"])
def test_check_tensors_finds_what_is_not_a_number(
    logits: Logits, model: Model, tmp_path: Path, mode: str
) -> None:
    damaged = tmp_path / "damaged.gguf"
    shutil.copyfile(model("F16"), damaged)
    with damaged.open("r+b") as file:
        file.seek(-1000, 2)  # in the last tensor, experts of the last layer
        file.write(b"\xff" * 64)
    arguments = ["--load-mode", mode, "--check-tensors"]
    result = logits.run([damaged], arguments, logits.engine.environment(cache_mib=2))
    assert result.returncode == 1
    assert result.lines("ffn_down_exps.weight", "has invalid data"), result.log


def test_experts_take_no_memory_of_llama_cpp(logits: Logits, model: Model) -> None:
    """Without mmap the loader has them in its hands, but keeps none of them."""
    result = logits.assert_equal([model("many")], ["--load-mode", "none"], stock=(), cache_mib=1)
    assert result.lines("moetuner: expert cache for", "of 128 units"), result.log


@pytest.fixture(scope="module")
def split_model(
    engine: Engine, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Name → first part; three or more parts, experts in all of them."""
    directory = tmp_path_factory.mktemp("split")
    parts = {}
    for name in ("hy_v3", "gpt-oss"):
        prefix = directory / name
        command: list[str | Path] = [engine.llama.gguf_split, "--split", "--split-max-tensors"]
        result = run_program([*command, "15", model(name), prefix])
        assert result.returncode == 0, result.log
        files = sorted(directory.glob(f"{name}-*.gguf"))
        assert len(files) >= 3
        parts[name] = files[0]
    return parts


@pytest.mark.parametrize("mode", ["mmap", "none", "dio"])
@pytest.mark.parametrize("name", ["hy_v3", "gpt-oss"])
def test_split_files(
    logits: Logits, model: Model, split_model: dict[str, Path], mode: str, name: str
) -> None:
    got = logits.assert_equal([split_model[name]], ["--load-mode", mode], stock=(), cache_mib=2)
    # One model, not one for each part.
    assert len(got.lines("moetuner: expert cache for")) == 1
    assert got.logits == logits.stock([model(name)]).logits


@pytest.fixture(scope="module")
def others() -> tuple[Path, Path]:
    """Two models with the same names and sizes of all tensors, but other values."""
    spec = MODELS["Q8_0"]
    directory = cache_directory() / "models"
    return ensure(spec, directory), ensure(ModelSpec(**{**vars(spec), "seed": 2}), directory)


@pytest.mark.parametrize("mode", ["mmap", "none"])
@pytest.mark.parametrize("how", ["one after the other", "at the same time"])
def test_two_models_that_look_alike(
    logits: Logits, others: tuple[Path, Path], mode: str, how: str
) -> None:
    arguments: list[object] = ["--load-mode", mode, "--batches", "8,64"]
    arguments += ["--parallel"] if how == "at the same time" else []
    got = logits.assert_equal(others, arguments, stock=["--batches", "8,64"], cache_mib=2)
    assert len(got.lines("moetuner: expert cache for")) == 2
    assert got.logits[0] != got.logits[1]


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_one_file_loaded_twice(logits: Logits, model: Model, mode: str) -> None:
    pair = [model("Q4_K")] * 2
    got = logits.assert_equal(pair, ["--load-mode", mode], stock=(), cache_mib=2)
    assert len(got.lines("moetuner: expert cache for")) == 2


@pytest.mark.parametrize("cache_mib", [1, 4])
def test_contexts_share_a_cache(logits: Logits, model: Model, cache_mib: int) -> None:
    """Three threads want more units than there are, and each gets its turn."""
    arguments = ["--share", "--parallel", "--batches", "2,64", "--decode", 24]
    got = logits.assert_equal([model("Q8_0")] * 3, arguments, cache_mib=cache_mib)
    assert len(got.lines("moetuner: expert cache for")) == 1


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_unloaded_and_loaded_again(logits: Logits, model: Model, mode: str) -> None:
    arguments = ["--load-mode", mode, "--rounds", 3]
    got = logits.assert_equal([model("olmoe")], arguments, stock=(), cache_mib=2)
    assert len(got.lines("moetuner: expert cache for")) == 3


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_adapter_on_experts(logits: Logits, model: Model, tmp_path: Path, mode: str) -> None:
    adapter = write_lora(MODELS["Q8_0"], tmp_path / "adapter.gguf")
    path = model("Q8_0")
    plain = ["--batches", "1,31", "--lora", adapter]
    got = logits.assert_equal([path], [*plain, "--load-mode", mode], stock=plain, cache_mib=2)
    assert got.logits != logits.stock([path], ["--batches", "1,31"]).logits


def test_node_by_node(logits: Logits, model: Model) -> None:
    """An evaluation callback has every node computed alone: down without gate and up."""
    arguments = ["--node-by-node", "--batches", "1,31"]
    logits.assert_equal([model("gpt-oss")], arguments, stock=["--batches", "1,31"], cache_mib=2)


@pytest.mark.parametrize("part", ["ffn_down", "blk.1.", "_up_exps"])
def test_some_matrices_only(logits: Logits, model: Model, part: str) -> None:
    got = logits.assert_equal([model("Q8_0")], ["--batches", "1,31"], cache_mib=2, tensors=part)
    units = 8 if part == "blk.1." else 16
    assert got.lines(f"of {units} units"), got.log


def test_hot_list(logits: Logits, model: Model, tmp_path: Path) -> None:
    """Saved at the end of one run, read at the start of the next."""
    saved = tmp_path / "hot"
    settings = {"cache_mib": 2, "hot_list": saved}
    first = logits.assert_equal([model("Q8_0")], **settings)  # type: ignore[arg-type]
    assert first.lines("moetuner: not warmed"), first.log
    assert saved.stat().st_size > 0
    second = logits.assert_equal([model("Q8_0")], **settings)  # type: ignore[arg-type]
    assert second.lines("moetuner: warming 4 units"), second.log
    other = logits.assert_equal([model("Q4_K")], **settings)  # type: ignore[arg-type]
    assert other.lines("moetuner: not warmed"), other.log
