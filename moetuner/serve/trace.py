"""Reads router traces: which experts each token was given to.

engine/src/page/trace.h is where the format is made, docs/engine.md describes it. Files may
be another program's, cut off or damaged: the answer is a trace or a MoetunerError.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetuner.errors import MissingRequirement, NotSo, SystemRefused, reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"moetrace"
VERSION = 1
HEADER = struct.Struct("<8s6IQQ48s928s")
ROW_HEAD_BYTES = 16
GROUPED = 1  # in `flags`
MOST_EXPERTS = 1 << 16
_AT_ONCE = 1 << 16  # rows that are looked at together


@dataclass(frozen=True)
class Trace:
    """A trace in memory that is the file's (read-only, read when it is used).

    `rows` has the fields evaluation, ms, layer, flags, row, rows and experts (`used` of them,
    in the router's order): one for each token in each layer. `started`: seconds of Unix time,
    from which `ms` counts. `cut`: bytes at the end that are no whole row.
    """

    model: str
    commit: str
    model_bytes: int
    layers: int
    experts: int
    used: int
    started: float
    rows: NDArray[Any]
    cut: int

    def evaluations(self) -> NDArray[Any]:
        """One entry for each evaluation that was recorded: evaluation, ms (of its first row)
        and tokens (the most that one of its layers had). A prompt shows as evaluations with
        many tokens, each further token as one with 1."""
        np = _numpy()
        rows = self.rows
        numbers, first, inverse = np.unique(
            rows["evaluation"], return_index=True, return_inverse=True
        )
        tokens = np.zeros(len(numbers), np.uint16)
        np.maximum.at(tokens, inverse.reshape(-1), rows["rows"])
        form = [("evaluation", "<u4"), ("ms", "<u4"), ("tokens", "<u2")]
        result: NDArray[Any] = np.empty(len(numbers), np.dtype(form))
        result["evaluation"], result["ms"], result["tokens"] = numbers, rows["ms"][first], tokens
        return result


def row_type(used: int) -> np.dtype[Any]:
    """One row of a trace as numpy has it; see TraceRow in trace.h."""
    form: np.dtype[Any] = _numpy().dtype(
        [
            ("evaluation", "<u4"),
            ("ms", "<u4"),
            ("layer", "<u2"),
            ("flags", "<u2"),
            ("row", "<u2"),
            ("rows", "<u2"),
            ("experts", "<u2", (used,)),
        ]
    )
    return form


def read(path: Path) -> Trace:
    """NotSo: no trace, another version, damaged. SystemRefused: it cannot be read.
    MissingRequirement: there is no numpy."""
    np = _numpy()
    try:
        with open(path, "rb", opener=_open_file) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(HEADER.size)
            header = _header(path, data, size)
            _, _, header_bytes, row_bytes, used, experts, layers, *rest = header
            count = (size - header_bytes) // row_bytes
            form = row_type(used)
            rows: NDArray[Any] = (
                np.memmap(file, form, "r", header_bytes, (count,)) if count else np.empty(0, form)
            )
    except OSError as error:
        raise SystemRefused(f"{path}: {reason(error)}") from error
    _check(path, rows, experts)
    started_ns, model_bytes, commit, model = rest
    return Trace(
        _text(model),
        _text(commit),
        model_bytes,
        layers,
        experts,
        used,
        started_ns / 1e9,
        rows,
        (size - header_bytes) % row_bytes,
    )


def _open_file(path: str, flags: int) -> int:
    # A pipe of that name would be waited for, and has no size.
    return os.open(path, flags | os.O_NONBLOCK)


def _header(path: Path, data: bytes, size: int) -> tuple[Any, ...]:
    if size == 0 and not data:
        raise NotSo(f"{path}: empty: nothing was recorded yet")
    if data[:8] != MAGIC:
        raise NotSo(f"{path}: it is not a router trace")
    if len(data) < HEADER.size:
        raise NotSo(f"{path}: the header is cut off: nothing was recorded yet")
    header = HEADER.unpack(data)
    _, version, header_bytes, row_bytes, used, experts, *_ = header
    if version != VERSION:
        raise NotSo(
            f"{path}: it has version {version}, this moetuner reads {VERSION}",
            "the engine and moetuner must be of one release",
        )
    if (
        not HEADER.size <= header_bytes <= size
        or not 1 <= used <= experts <= MOST_EXPERTS
        or row_bytes != ROW_HEAD_BYTES + 2 * used
    ):
        raise NotSo(f"{path}: the header makes no sense")
    return header


def _check(path: Path, rows: NDArray[Any], experts: int) -> None:
    for begin in range(0, len(rows), _AT_ONCE):
        part = rows[begin : begin + _AT_ONCE]
        wrong = (part["experts"] >= experts).any(axis=1) | (part["row"] >= part["rows"])
        if wrong.any():
            raise NotSo(f"{path}: row {begin + int(wrong.argmax())} is damaged")


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise MissingRequirement(
            "reading a router trace needs numpy", "pip install numpy, or apt python3-numpy"
        ) from error
    return numpy
