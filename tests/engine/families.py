"""Small models of further architectures: what their experts have that others have not.

mixtral      llama's layers with experts
no-gate      the same without gates: one product, an activation, one product
qwen2moe     a shared expert with a gate of its own
deepseek2    latent attention, sigmoid router with a bias, shared experts, a dense first layer
llama4       one expert for a token, which is weighted before its products, not after them
grovemoe     a second set of experts of another size, the same one twice for a token
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moetuner.demo.model import END, vocabulary
from moetuner.demo.weights import random_tensor, row_bytes

WIDTH, HIDDEN, HEADS, HEADS_KV, HEAD = 256, 512, 4, 2, 64
LATENT, ROTATED, PLAIN, VALUE = 64, 16, 32, 32  # of deepseek2's attention


@dataclass(frozen=True)
class Tensor:
    """`shape` has rows last; `spread` None: all ones."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "F16"
    spread: float | None = field(default=-1)

    def deviation(self) -> float | None:
        return self.shape[-1] ** -0.5 if self.spread == -1 else self.spread


@dataclass(frozen=True)
class Family:
    architecture: str
    layer: Callable[[str, int], Iterator[Tensor]]
    facts: Callable[[gguf.GGUFWriter], object]
    layers: int = 2
    experts: int = 8
    used: int = 3
    heads_kv: int = HEADS_KV
    rotated: int = HEAD


def ensure_family(name: str, directory: Path) -> Path:
    """The model's file below `directory`, written first if it is not there."""
    # Other tensors, another file.
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    path = directory / f"family-{name}-{version}.gguf"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        _write(FAMILIES[name], part)
        part.rename(path)
    return path


def _write(family: Family, path: Path) -> None:
    tokens = vocabulary()
    count = len(tokens.texts)
    writer = gguf.GGUFWriter(path, family.architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(family.layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(family.heads_kv)
    writer.add_rope_dimension_count(family.rotated)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(family.experts)
    writer.add_expert_used_count(family.used)
    family.facts(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens.texts))
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(list(tokens.merges))
    writer.add_eos_token_id(tokens.texts.index(END))
    tensors = [
        Tensor("token_embd.weight", (count, WIDTH), "F16", 1.0),
        Tensor("output.weight", (count, WIDTH), "F16", 3 * WIDTH**-0.5),
        Tensor("output_norm.weight", (WIDTH,), "F32", None),
    ]
    for layer in range(family.layers):
        tensors += family.layer(f"blk.{layer}", layer)
    for tensor in tensors:
        writer.add_tensor(tensor.name, *_data(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _data(tensor: Tensor) -> tuple[Any, ...]:
    """What GGUFWriter.add_tensor takes after the name."""
    spread = tensor.deviation()
    if spread is None:
        return (np.ones(tensor.shape, dtype=np.float32),)
    data = random_tensor(tensor.name, tensor.shape, tensor.dtype, 1, spread)
    if tensor.dtype in ("F16", "F32"):
        return (data,)
    *outer, length = tensor.shape
    kind = gguf.GGMLQuantizationType[tensor.dtype]
    return data.reshape(*outer, row_bytes(tensor.dtype, length)), None, kind


def _norms(block: str, *names: str, size: int = WIDTH) -> Iterator[Tensor]:
    for name in names:
        yield Tensor(f"{block}.{name}.weight", (size,), "F32", None)


def _attention(block: str) -> Iterator[Tensor]:
    yield from _norms(block, "attn_norm", "ffn_norm")
    for name, rows in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
        yield Tensor(f"{block}.attn_{name}.weight", (rows * HEAD, WIDTH))
    yield Tensor(f"{block}.attn_output.weight", (WIDTH, HEADS * HEAD))


def _feed_forward(
    block: str,
    kind: str,
    dtype: str,
    *,
    hidden: int = HIDDEN,
    experts: int = 0,
    parts: str = "gate up down",
) -> Iterator[Tensor]:
    """`kind`: what follows ffn_gate. `experts` 0: one matrix each."""
    shapes = {"gate": (hidden, WIDTH), "up": (hidden, WIDTH), "down": (WIDTH, hidden)}
    for part in parts.split():
        shape = (experts, *shapes[part]) if experts else shapes[part]
        yield Tensor(f"{block}.ffn_{part}{kind}.weight", shape, dtype)


def _router(block: str) -> Tensor:
    return Tensor(f"{block}.ffn_gate_inp.weight", (8, WIDTH), "F32")


def _mixtral(block: str, layer: int) -> Iterator[Tensor]:
    yield from _attention(block)
    yield _router(block)
    yield from _feed_forward(block, "_exps", "Q5_K", experts=8)


def _no_gate(block: str, layer: int) -> Iterator[Tensor]:
    yield from _attention(block)
    yield _router(block)
    yield from _feed_forward(block, "_exps", "Q6_K", experts=8, parts="up down")


def _qwen2moe(block: str, layer: int) -> Iterator[Tensor]:
    yield from _attention(block)
    yield _router(block)
    yield from _feed_forward(block, "_exps", "IQ4_XS", experts=8)
    yield Tensor(f"{block}.ffn_gate_inp_shexp.weight", (WIDTH,), "F32", 0.1)
    yield from _feed_forward(block, "_shexp", "Q8_0")


def _deepseek2(block: str, layer: int) -> Iterator[Tensor]:
    yield from _norms(block, "attn_norm", "ffn_norm")
    yield from _norms(block, "attn_q_a_norm", "attn_kv_a_norm", size=LATENT)
    yield Tensor(f"{block}.attn_q_a.weight", (LATENT, WIDTH))
    yield Tensor(f"{block}.attn_q_b.weight", (HEADS * (PLAIN + ROTATED), LATENT))
    yield Tensor(f"{block}.attn_kv_a_mqa.weight", (LATENT + ROTATED, WIDTH))
    yield Tensor(f"{block}.attn_k_b.weight", (HEADS, LATENT, PLAIN))
    yield Tensor(f"{block}.attn_v_b.weight", (HEADS, VALUE, LATENT))
    yield Tensor(f"{block}.attn_output.weight", (WIDTH, HEADS * VALUE))
    if layer == 0:
        yield from _feed_forward(block, "", "Q4_K")
        return
    yield _router(block)
    yield Tensor(f"{block}.exp_probs_b.bias", (8,), "F32", 0.1)
    yield from _feed_forward(block, "_exps", "Q4_K", experts=8)
    yield from _feed_forward(block, "_shexp", "Q4_K")


def _llama4(block: str, layer: int) -> Iterator[Tensor]:
    yield from _attention(block)
    yield _router(block)
    yield from _feed_forward(block, "_exps", "Q4_0", experts=8)
    yield from _feed_forward(block, "_shexp", "Q4_0")


def _grovemoe(block: str, layer: int) -> Iterator[Tensor]:
    yield from _attention(block)
    yield from _norms(block, "attn_q_norm", "attn_k_norm", size=HEAD)
    yield _router(block)
    yield from _feed_forward(block, "_exps", "Q8_0", experts=8)
    yield from _feed_forward(block, "_chexps", "Q8_0", experts=4, hidden=96)


def _no_facts(writer: gguf.GGUFWriter) -> None:
    pass


def _shared_facts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_expert_shared_feed_forward_length(HIDDEN)


def _deepseek2_facts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(LATENT)
    writer.add_kv_lora_rank(LATENT)
    writer.add_key_length(LATENT + ROTATED)
    writer.add_value_length(LATENT)
    writer.add_key_length_mla(PLAIN + ROTATED)
    writer.add_value_length_mla(VALUE)
    writer.add_expert_shared_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)


def _llama4_facts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_interleave_moe_layer_step(1)


def _grovemoe_facts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_feed_forward_length(HIDDEN)
    writer.add_expert_chunk_feed_forward_length(96)
    writer.add_expert_group_scale(0.5)
    writer.add_experts_per_group(2)


FAMILIES = {
    "mixtral": Family("llama", _mixtral, _no_facts),
    "no-gate": Family("llama", _no_gate, _no_facts),
    "qwen2moe": Family("qwen2moe", _qwen2moe, _shared_facts),
    "deepseek2": Family(
        "deepseek2", _deepseek2, _deepseek2_facts, layers=3, heads_kv=1, rotated=ROTATED
    ),
    # Each fourth layer sees all tokens: fewer layers llama.cpp cannot compute.
    "llama4": Family("llama4", _llama4, _llama4_facts, layers=4, used=1),
    "grovemoe": Family("grovemoe", _grovemoe, _grovemoe_facts),
}
