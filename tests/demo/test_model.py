"""The generated models: same parameters, same bytes; readable; refused when impossible."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from moetuner.demo.model import ModelSpec, ensure, vocabulary, write
from moetuner.demo.weights import TYPES, random_tensor
from moetuner.errors import UsageError

TINY = ModelSpec(layers=1, experts=2, embedding=64, feed_forward=32, head_size=32, heads_kv=1)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_same_parameters_give_the_same_bytes(tmp_path: Path) -> None:
    write(TINY, tmp_path / "a.gguf")
    write(TINY, tmp_path / "b.gguf")
    write(replace(TINY, seed=2), tmp_path / "c.gguf")
    assert _sha256(tmp_path / "a.gguf") == _sha256(tmp_path / "b.gguf")
    assert _sha256(tmp_path / "a.gguf") != _sha256(tmp_path / "c.gguf")


def test_weights_do_not_depend_on_the_library_s_version() -> None:
    data = random_tensor("blk.0.ffn_up_exps.weight", (2, 64), "Q8_0", 1, 0.1)
    assert hashlib.sha256(data.tobytes()).hexdigest()[:16] == "5b471a2c85590d69"
    half = random_tensor("blk.0.attn_q.weight", (2, 64), "F16", 1, 0.1)
    assert hashlib.sha256(half.tobytes()).hexdigest()[:16] == "c8653a464844ce0b"


def test_it_is_kept_under_its_parameters(tmp_path: Path) -> None:
    path = ensure(TINY, tmp_path)
    first = path.stat().st_mtime_ns
    assert ensure(TINY, tmp_path).stat().st_mtime_ns == first
    assert ensure(replace(TINY, experts=4), tmp_path) != path
    assert sorted(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("family", ["qwen3moe", "qwen3", "gpt-oss"])
def test_another_reader_finds_what_was_asked_for(tmp_path: Path, family: str) -> None:
    spec = replace(TINY, family=family, expert_type="MXFP4")
    reader = gguf.GGUFReader(ensure(spec, tmp_path))
    assert reader.fields["general.architecture"].contents() == family
    assert reader.fields[f"{family}.block_count"].contents() == 1
    names = {tensor.name: tensor for tensor in reader.tensors}
    if spec.is_moe:
        gate = names["blk.0.ffn_gate_exps.weight"]
        assert gate.shape.tolist() == [64, 32, 2]
        assert gate.tensor_type == gguf.GGMLQuantizationType.MXFP4
        slices = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        total = sum(names[f"blk.0.{name}.weight"].n_bytes for name in slices)
        assert total == 2 * spec.unit_bytes()
    else:
        assert not [name for name in names if "exps" in name]


@pytest.mark.parametrize("dtype", TYPES)
def test_values_centre_on_zero_with_the_spread_asked_for(dtype: str) -> None:
    data = random_tensor("t", (64, 512), dtype, 1, 0.1)
    if dtype in ("F32", "F16"):
        values = data.astype(np.float32)
    else:
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])
    assert abs(float(values.mean())) < 0.02
    assert 0.05 < float(values.std()) < 0.2
    assert np.isfinite(values).all()


def test_the_dense_twin_computes_as_much_per_token() -> None:
    dense = ModelSpec().dense()
    assert dense.family == "qwen3"
    assert dense.feed_forward == ModelSpec().experts_used * ModelSpec().feed_forward


def test_odd_slices_are_possible() -> None:
    spec = replace(TINY, embedding=288, feed_forward=96)
    assert spec.unit_bytes() % 4096 != 0
    spec.validate()


def test_every_byte_is_a_token_and_words_are_printable() -> None:
    tokens = vocabulary()
    assert len(set(tokens.texts)) == len(tokens.texts)
    assert tokens.first_syllable == 256
    syllables = tokens.texts[tokens.first_syllable : tokens.first_special]
    assert "ba" in syllables and "Ġba" in syllables
    assert len(tokens.merges) == len(syllables)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(TINY, family="bert"), "unknown family bert"),
        (replace(TINY, experts_used=3), "3 of 2 experts"),
        (replace(TINY, expert_type="Q9"), "unknown tensor type Q9"),
        (replace(TINY, expert_type="Q4_K"), "rows of 64 values do not fit Q4_K"),
        (replace(TINY, heads=3, heads_kv=2), "multiple of heads_kv"),
    ],
)
def test_impossible_models_are_refused(tmp_path: Path, spec: ModelSpec, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ensure(spec, tmp_path)
    assert list(tmp_path.iterdir()) == []
