"""Random tensor data in ggml's types, the same bytes for the same seed everywhere.

A quantised tensor is made of random blocks whose scale fields are set to one value,
so no quantiser is needed and any type is as quick as the next. The random bits are
PCG64's raw stream, which NumPy keeps stable between versions (its distributions
are not).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from moetuner.errors import UsageError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Block:
    """Where a block's half-precision scales are.

    `scales` maps a byte offset to a factor; `spread` is the standard deviation of a
    block's values when all other bits are random and the factor's scale is 1.
    """

    scales: tuple[tuple[int, float], ...]
    spread: float


# A type with minima (…_K) gets dmin = d × the mean quant, so that its values centre on 0.
_BLOCKS: dict[str, _Block] = {
    "Q8_0": _Block(((0, 1.0),), 73.9),
    "Q4_0": _Block(((0, 1.0),), 4.6),
    "IQ4_NL": _Block(((0, 1.0),), 72.0),
    "IQ4_XS": _Block(((0, 1.0),), 1330.0),
    "Q2_K": _Block(((80, 1.0), (82, 1.5)), 13.9),
    "Q3_K": _Block(((108, 1.0),), 42.0),
    "Q4_K": _Block(((0, 1.0), (2, 7.5)), 255.0),
    "Q5_K": _Block(((0, 1.0), (2, 15.5)), 527.0),
    "Q6_K": _Block(((208, 1.0),), 1369.0),
}
_MXFP4_SPREAD = 2.93  # of the sixteen values of E2M1
_PLAIN = ("F32", "F16", "BF16")
TYPES: tuple[str, ...] = (*_PLAIN, "MXFP4", *_BLOCKS)


def row_bytes(dtype: str, length: int) -> int:
    """Bytes of one row; UsageError if the type is unknown or the length not whole blocks."""
    if dtype not in TYPES:
        raise UsageError(f"unknown tensor type {dtype}", "one of " + ", ".join(TYPES))
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    if length % block:
        raise UsageError(f"rows of {length} values do not fit {dtype}", f"a multiple of {block}")
    return int(length // block * size)


def random_tensor(
    name: str, shape: Sequence[int], dtype: str, seed: int, spread: float
) -> NDArray[Any]:
    """Data of `shape` (rows last), values around 0 with standard deviation `spread`.

    F32 and F16 come in their own NumPy type, all other types as uint8 whose last
    axis is bytes. Deterministic in (name, shape, dtype, seed, spread).
    """
    *outer, length = shape
    size = row_bytes(dtype, length)
    if dtype in _PLAIN:
        return _plain(name, shape, dtype, seed, spread)
    bits = _random_bytes(name, seed, math.prod(outer) * size)
    if dtype == "MXFP4":
        blocks = bits.reshape(-1, 17)
        blocks[:, 0] = 127 + round(math.log2(spread / _MXFP4_SPREAD))  # E8M0 exponent
    else:
        layout = _BLOCKS[dtype]
        block_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][1]
        blocks = bits.reshape(-1, block_size)
        for offset, factor in layout.scales:
            scale = np.array([factor * spread / layout.spread], dtype="<f2").view(np.uint8)
            blocks[:, offset : offset + 2] = scale
    return bits.reshape(*outer, size)


def _plain(name: str, shape: Sequence[int], dtype: str, seed: int, spread: float) -> NDArray[Any]:
    raw = _random_bytes(name, seed, 4 * math.prod(shape)).view("<u4")
    # Uniform in ±√3 · spread has the standard deviation asked for.
    unit = raw.astype(np.float64) / 2**32 - 0.5
    values = (unit * (math.sqrt(12) * spread)).astype(np.float32).reshape(shape)
    if dtype == "F16":
        return values.astype(np.float16)
    if dtype == "BF16":
        return np.ascontiguousarray(values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    return values


def _random_bytes(name: str, seed: int, count: int) -> Bytes:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(-(-count // 8))
    data: Bytes = np.asarray(words, dtype="<u8").view(np.uint8)[:count].copy()
    return data
