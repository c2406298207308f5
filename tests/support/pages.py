"""Pages and traces of engines as bytes, written by the tables of docs/engine.md."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping, Sequence

# Offsets in the part with the figures, the sequence number included.
FIGURES = {
    "sequence": 0,
    "state": 8,
    "published_ns": 16,
    "evaluations": 32,
    "tokens": 40,
    "failed": 48,
    "applied": 56,
    "threads": 64,
    "threads_given": 72,
    "depth": 80,
    "depth_max": 88,
    "arena_bytes": 104,
    "locked_bytes": 120,
    "units": 136,
    "slots": 144,
    "used_slots": 152,
    "hits": 168,
    "joined": 176,
    "misses": 184,
    "bytes": 192,
    "waits": 200,
    "wait_ns": 208,
    "reads": 264,
    "trace_state": 328,
    "trace_rows": 336,
    "trace_lost": 344,
    "trace_errno": 352,
    "experts": 368,
}


def page(
    figures: Mapping[str, int] = {},
    *,
    layers: Sequence[Sequence[int]] = ((0,) * 8,),
    latency: Mapping[int, int] = {},
    model: bytes = b"/models/some.gguf",
    trace_file: bytes = b"",
    pid: int = 0,
    version: int = 1,
) -> bytes:
    """`layers`: rows of 8 numbers. `latency`: by bucket."""
    data = bytearray(4096 + 64 * len(layers))
    struct.pack_into("<8sII", data, 0, b"moetuner", version, len(data))
    struct.pack_into("<8I", data, 16, 64, 960, 1024, 1024, 2048, 2048, 4096, 64 * len(layers))
    struct.pack_into("<II", data, 48, 64, len(layers))
    struct.pack_into("<I4xQ48s896s", data, 64, pid, 1_700_000_000_000_000_000, b"abc1234", model)
    for name, value in figures.items():
        struct.pack_into("<Q", data, 2048 + FIGURES[name], value)
    for bucket, count in latency.items():
        struct.pack_into("<Q", data, 2048 + 512 + 8 * bucket, count)
    data[2048 + 704 : 2048 + 704 + len(trace_file)] = trace_file
    for index, row in enumerate(layers):
        struct.pack_into("<8Q", data, 4096 + 64 * index, *row)
    return bytes(data)


def memfd(data: bytes, *, name: str = "moetuner-experts", sealed: bool = True) -> int:
    """An anonymous file with the bytes, as engines make it; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def trace(
    rows: Sequence[tuple[int, int, int, int, int, int, Sequence[int]]] = (),
    *,
    used: int = 2,
    experts: int = 8,
    version: int = 1,
    header_bytes: int = 1024,
    row_bytes: int | None = None,
    model: bytes = b"/models/some.gguf",
) -> bytes:
    """`rows`: evaluation, ms, layer, flags, row, rows, experts."""
    size = 16 + 2 * used if row_bytes is None else row_bytes
    head = struct.pack("<8s6I", b"moetrace", version, header_bytes, size, used, experts, 3)
    head += struct.pack("<QQ48s928s", 1_700_000_000_000_000_000, 5 << 30, b"abc1234", model)
    body = b"".join(struct.pack(f"<IIHHHH{used}H", *row[:6], *row[6]) for row in rows)
    return head + body
