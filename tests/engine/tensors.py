"""Where tensors lie in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf


def range_of(model: Path, name: str) -> tuple[int, int]:
    """Begin and end of a tensor's bytes. KeyError if there is none of that name."""
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name == name:
            begin = int(tensor.data_offset)
            return begin, begin + int(tensor.n_bytes)
    raise KeyError(name)
