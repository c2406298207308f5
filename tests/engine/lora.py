"""A small adapter for the experts of a generated model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from moetuner.demo.model import ModelSpec

RANK = 4


def write_lora(spec: ModelSpec, path: Path) -> Path:
    """Changes up and down of all experts of layer 0, so much that logits show it."""
    writer = gguf.GGUFWriter(path, spec.family)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    random = np.random.RandomState(spec.seed)  # the legacy generator: stable between versions
    shapes = {
        "ffn_up_exps": (spec.embedding, spec.feed_forward),
        "ffn_down_exps": (spec.feed_forward, spec.embedding),
    }
    for name, (columns, rows) in shapes.items():
        for part, shape in (("a", (RANK, columns)), ("b", (rows, RANK))):
            data = random.standard_normal((spec.experts, *shape)).astype(np.float32) * 0.1
            writer.add_tensor(f"blk.0.{name}.weight.lora_{part}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
