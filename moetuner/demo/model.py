"""Small models that the real llama.cpp loads: random weights, a working tokenizer.

The text they write is made of invented syllables. The same parameters give the same
bytes, and a file is kept under the hash of its parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from moetuner.demo.weights import random_tensor, row_bytes
from moetuner.errors import SystemRefused, UsageError, reason

FORMAT = 1  # part of the hash: raise it when the same parameters give other bytes
LOGIT_SPREAD = 3.0  # how decided the model is: the best of 220 tokens leads by about 1
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FAMILIES = ("qwen3moe", "qwen3", "gpt-oss", "olmoe", "hy_v3")


@dataclass(frozen=True)
class ModelSpec:
    """What is in a model. The default is the demonstration's: 13 MB, 4 layers × 8 experts.

    `family` is llama.cpp's architecture: `qwen3moe`, its dense twin `qwen3` (experts
    are ignored, `feed_forward` is the layer's), `gpt-oss` (biases, its own activation),
    `olmoe` (weights of experts not normalised), or `hy_v3` (gate and up in one matrix, a
    shared expert of the same size, the first layer dense). `expert_type` is the type of
    all expert matrices, `down_type` that of the down projections where it differs; all
    other matrices have `dense_type`. One expert's slice is `feed_forward` rows of
    `embedding` values, or the other way round.

    `token_spread` is the standard deviation of the tokens' embeddings. The larger it is, the
    more the current token alone decides which experts are used, and the more of them a text
    needs.
    """

    family: str = "qwen3moe"
    layers: int = 4
    experts: int = 8
    experts_used: int = 2
    embedding: int = 256
    feed_forward: int = 512
    heads: int = 4
    heads_kv: int = 2
    head_size: int = 64
    context: int = 40960
    expert_type: str = "Q8_0"
    down_type: str | None = None
    dense_type: str = "F16"
    token_spread: float = 1.0
    seed: int = 1

    @property
    def is_moe(self) -> bool:
        return self.family != "qwen3"

    def dense(self) -> ModelSpec:
        """The dense twin: as many feed-forward values per token as the experts in use have."""
        values = {**asdict(self), "family": "qwen3"}
        values["feed_forward"] = self.feed_forward * self.experts_used
        return ModelSpec(**values)

    def unit_bytes(self) -> int:
        """Bytes of one expert of one layer: its gate, up and down slices."""
        rows = 2 * self.feed_forward * row_bytes(self.expert_type, self.embedding)
        down = self.embedding * row_bytes(self.down_type or self.expert_type, self.feed_forward)
        return rows + down

    def file_name(self) -> str:
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        experts = f"x{self.experts}" if self.is_moe else ""
        return f"{self.family}-{self.layers}{experts}-{self.expert_type.lower()}-{digest}.gguf"

    def validate(self) -> None:
        """UsageError for a model that llama.cpp would refuse."""
        if self.family not in FAMILIES:
            raise UsageError(f"unknown family {self.family}", "one of " + ", ".join(FAMILIES))
        if self.is_moe and not 1 <= self.experts_used <= self.experts:
            raise UsageError(f"{self.experts_used} of {self.experts} experts cannot be used")
        if self.heads % self.heads_kv or self.head_size % 2:
            raise UsageError("heads must be a multiple of heads_kv, and head_size even")
        if self.family == "olmoe" and self.heads_kv * self.head_size != self.embedding:
            raise UsageError("olmoe has heads = heads_kv, together as wide as the embedding")
        self.unit_bytes()


@dataclass(frozen=True)
class _Tensor:
    """Name, shape with rows last, type, and standard deviation; None: all ones."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spread: float | None


def ensure(spec: ModelSpec, directory: Path) -> Path:
    """The model's file below `directory`, written first if it is not there."""
    path = directory / spec.file_name()
    if path.is_file():
        return path
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write(spec, part)
        part.rename(path)
    except OSError as error:
        raise SystemRefused(f"cannot write {path}: {reason(error)}") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def write(spec: ModelSpec, path: Path) -> None:
    """Writes the model; one tensor is in memory at a time. UsageError for impossible specs."""
    spec.validate()
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, spec.family)
    _add_facts(writer, spec, tokens)
    tensors = list(_tensors(spec, len(tokens.texts)))
    for tensor in tensors:
        raw = gguf.GGMLQuantizationType[tensor.dtype]
        *outer, length = tensor.shape
        size = row_bytes(tensor.dtype, length)
        native = {"F32": np.float32, "F16": np.float16}.get(tensor.dtype)
        writer.add_tensor_info(
            tensor.name,
            tensor.shape if native else (*outer, size),
            np.dtype(native or np.uint8),
            int(np.prod(outer, dtype=np.int64)) * size,
            raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_data(tensor, spec, tokens))
    writer.close()


def _data(tensor: _Tensor, spec: ModelSpec, tokens: Vocabulary) -> NDArray[Any]:
    if tensor.spread is None:
        return np.ones(tensor.shape, dtype=np.float32)
    data = random_tensor(tensor.name, tensor.shape, tensor.dtype, spec.seed, tensor.spread)
    if tensor.name == "output.weight":
        # Logit 0 for bytes and for the end of the text: sampling seldom takes them.
        data[: tokens.first_syllable] = 0
        data[tokens.first_special :] = 0
    return data


def _tensors(spec: ModelSpec, vocabulary_size: int) -> Iterator[_Tensor]:
    width, hidden, experts = spec.embedding, spec.feed_forward, spec.experts
    attention, shared = spec.heads * spec.head_size, spec.heads_kv * spec.head_size
    oss = spec.family == "gpt-oss"
    fused = spec.family == "hy_v3"
    down_type = spec.down_type or spec.expert_type

    def matrix(name: str, rows: int, columns: int, dtype: str = spec.dense_type) -> _Tensor:
        return _Tensor(f"{name}.weight", (rows, columns), dtype, columns**-0.5)

    def experts_of(name: str, rows: int, columns: int, dtype: str) -> _Tensor:
        return _Tensor(f"{name}.weight", (experts, rows, columns), dtype, columns**-0.5)

    def ones(name: str, size: int) -> _Tensor:
        return _Tensor(f"{name}.weight", (size,), "F32", None)

    def bias(name: str, *shape: int) -> _Tensor:
        return _Tensor(name, shape, "F32", 0.1)

    # In half precision whatever the rest is: rows of the output are set to zero.
    yield _Tensor("token_embd.weight", (vocabulary_size, width), "F16", spec.token_spread)
    yield _Tensor("output.weight", (vocabulary_size, width), "F16", LOGIT_SPREAD * width**-0.5)
    yield ones("output_norm", width)
    for layer in range(spec.layers):
        block = f"blk.{layer}"
        yield ones(f"{block}.attn_norm", width)
        yield matrix(f"{block}.attn_q", attention, width)
        yield matrix(f"{block}.attn_k", shared, width)
        yield matrix(f"{block}.attn_v", shared, width)
        yield matrix(f"{block}.attn_output", width, attention)
        if oss:
            yield bias(f"{block}.attn_q.bias", attention)
            yield bias(f"{block}.attn_k.bias", shared)
            yield bias(f"{block}.attn_v.bias", shared)
            yield bias(f"{block}.attn_output.bias", width)
            yield bias(f"{block}.attn_sinks.weight", spec.heads)
            yield ones(f"{block}.post_attention_norm", width)
        else:
            normed = attention if spec.family == "olmoe" else spec.head_size
            yield ones(f"{block}.attn_q_norm", normed)
            yield ones(f"{block}.attn_k_norm", normed)
            yield ones(f"{block}.ffn_norm", width)
        if not spec.is_moe or (fused and layer == 0):
            yield matrix(f"{block}.ffn_gate", hidden, width, spec.expert_type)
            yield matrix(f"{block}.ffn_up", hidden, width, spec.expert_type)
            yield matrix(f"{block}.ffn_down", width, hidden, down_type)
            continue
        yield matrix(f"{block}.ffn_gate_inp", experts, width, "F32")
        if fused:
            yield experts_of(f"{block}.ffn_gate_up_exps", 2 * hidden, width, spec.expert_type)
            yield matrix(f"{block}.ffn_gate_shexp", hidden, width)
            yield matrix(f"{block}.ffn_up_shexp", hidden, width)
            yield matrix(f"{block}.ffn_down_shexp", width, hidden)
        else:
            yield experts_of(f"{block}.ffn_gate_exps", hidden, width, spec.expert_type)
            yield experts_of(f"{block}.ffn_up_exps", hidden, width, spec.expert_type)
        yield experts_of(f"{block}.ffn_down_exps", width, hidden, down_type)
        if oss:
            yield bias(f"{block}.ffn_gate_inp.bias", experts)
            yield bias(f"{block}.ffn_gate_exps.bias", experts, hidden)
            yield bias(f"{block}.ffn_up_exps.bias", experts, hidden)
            yield bias(f"{block}.ffn_down_exps.bias", experts, width)


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE: 256 bytes, then syllables, then special tokens."""

    texts: tuple[str, ...]
    merges: tuple[str, ...]
    first_syllable: int
    first_special: int


def vocabulary() -> Vocabulary:
    """Every byte is a token, so that any text can be read; the model writes syllables."""
    letters = _byte_letters()
    space = letters[ord(" ")]
    consonants = [letter for letter in string.ascii_lowercase if letter not in "aeiouqxy"]
    syllables = [(first, vowel) for first in consonants for vowel in "aeiou"]
    merges = [f"{first} {vowel}" for first, vowel in syllables]
    merges += [f"{space} {first}{vowel}" for first, vowel in syllables]
    endings = [("s", "."), ("n", ","), ("r", letters[ord("\n")])]
    merges += [f"{first} {second}" for first, second in endings]
    texts = [*letters, *(merge.replace(" ", "") for merge in merges)]
    special = (END, TURN, TURN_END)
    return Vocabulary((*texts, *special), tuple(merges), 256, len(texts))


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself, else from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def _add_facts(writer: Any, spec: ModelSpec, tokens: Vocabulary) -> None:
    writer.add_name(f"moetuner demonstration ({spec.family}, random weights)")
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.embedding)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.feed_forward)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.heads_kv)
    writer.add_key_length(spec.head_size)
    writer.add_value_length(spec.head_size)
    writer.add_rope_dimension_count(spec.head_size)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if spec.is_moe:
        writer.add_expert_count(spec.experts)
        writer.add_expert_used_count(spec.experts_used)
        writer.add_expert_feed_forward_length(spec.feed_forward)
    if spec.family == "gpt-oss":
        writer.add_sliding_window(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens.texts))
    kinds = [gguf.TokenType.NORMAL] * tokens.first_special
    kinds += [gguf.TokenType.CONTROL] * (len(tokens.texts) - tokens.first_special)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(tokens.merges))
    writer.add_eos_token_id(tokens.first_special)
    writer.add_pad_token_id(tokens.first_special)
    writer.add_add_bos_token(False)
    writer.add_file_type(_file_type(spec.expert_type))


def _file_type(dtype: str) -> int:
    """What llama.cpp's tools show as the model's type."""
    for name in (f"MOSTLY_{dtype}", f"MOSTLY_{dtype}_M", f"MOSTLY_{dtype}_MOE", f"ALL_{dtype}"):
        if name in gguf.LlamaFileType.__members__:
            return int(gguf.LlamaFileType[name])
    return int(gguf.LlamaFileType.GUESSED)
