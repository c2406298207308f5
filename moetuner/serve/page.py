"""What the bytes of an engine's shared page mean.

engine/src/page/layout.h is where the layout is made, docs/engine.md has it as a table. The
bytes come from other processes: whatever they are, the answer is a value or NotSo.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from moetuner.errors import NotSo

MAGIC = b"moetuner"
VERSION = 1
HEADER_BYTES = 64
MOST_BYTES = 1 << 20  # of a page; a thousand layers take 68 KiB
TEXT_BYTES = 960  # of a file name
LATENCY_BUCKETS = 24

_HEADER = struct.Struct("<8sII8III8x")
_IDENTITY = struct.Struct("<I4xQ48s896s")
_CONTROL = struct.Struct(f"<5I44x{TEXT_BYTES}s")
_LAYER = struct.Struct("<8Q")
_FIGURE_COUNT = 46
_FIGURES = struct.Struct(f"<Q{_FIGURE_COUNT}Q136x{LATENCY_BUCKETS}Q{TEXT_BYTES}s")

STATES = {1: "running", 2: "failed", 3: "ended"}
TRACE_STATES = {0: "off", 1: "on", 2: "broken"}


class Section(NamedTuple):
    """Where a part of the page lies, in bytes."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """`bytes`: of the page. `layers`: rows of `layer_bytes` bytes."""

    bytes: int
    identity: Section
    control: Section
    figures: Section
    layers: Section
    layer_bytes: int
    layer_count: int


@dataclass(frozen=True)
class Identity:
    """`pid`: as the process itself sees it. `made`: seconds of Unix time. `commit`: of ggml."""

    pid: int
    made: float
    commit: str
    model: str


@dataclass(frozen=True)
class Control:
    """What is wished for; see layout.h. `generation`: odd while it is written."""

    generation: int
    depth: int
    threads: int
    trace_request: int
    trace_on: int
    trace_file: bytes


@dataclass(frozen=True)
class Figures:
    """Counters since the model was loaded, and what is so now; see layout.h for each.

    `latency[k]`: reads that took 2^k to 2^(k + 1) µs.
    """

    state: int
    published_ns: int
    operations: int
    evaluations: int
    tokens: int
    failed: int
    applied: int
    threads: int
    threads_given: int
    depth: int
    depth_max: int
    budget: int
    arena_bytes: int
    peak_bytes: int
    locked_bytes: int
    lock_errno: int
    units: int
    slots: int
    used_slots: int
    block: int
    hits: int
    joined: int
    misses: int
    bytes: int
    waits: int
    wait_ns: int
    evictions: int
    rounds: int
    blocked: int
    prefetched: int
    prefetch_used: int
    prefetch_dropped: int
    reads: int
    retries: int
    buffered: int
    failures: int
    in_flight: int
    in_flight_high: int
    queued: int
    queued_high: int
    trace_state: int
    trace_rows: int
    trace_lost: int
    trace_errno: int
    model_bytes: int
    experts: int
    latency: tuple[int, ...]
    trace_file: str


@dataclass(frozen=True)
class Layer:
    """The counters of one layer; `layer` is the model's number of it."""

    layer: int
    hits: int
    joined: int
    misses: int
    bytes: int
    waits: int
    wait_ns: int
    evictions: int


assert len(fields(Figures)) == _FIGURE_COUNT + 2


def header(data: bytes) -> Header:
    """The first HEADER_BYTES of a page. NotSo: it is none, or none that this version reads."""
    if len(data) < HEADER_BYTES:
        raise NotSo("the page is too short")
    magic, version, size, *numbers = _HEADER.unpack_from(data)
    if magic == bytes(8):
        raise NotSo("the page is still being made")
    if magic != MAGIC:
        raise NotSo("it is not a page of the expert cache")
    if version != VERSION:
        raise NotSo(
            f"the page has version {version}, this moetuner reads {VERSION}",
            "the engine and moetuner must be of one release",
        )
    sections = tuple(Section(*numbers[index : index + 2]) for index in range(0, 8, 2))
    layer_bytes, layer_count = numbers[8:]
    least = (_IDENTITY.size, _CONTROL.size, _FIGURES.size, layer_count * layer_bytes)
    for section, smallest in zip(sections, least, strict=True):
        end = section.offset + section.bytes
        if section.offset < HEADER_BYTES or section.bytes < smallest or end > size:
            raise NotSo("the page's header makes no sense")
    if size > MOST_BYTES or layer_bytes < _LAYER.size:
        raise NotSo("the page's header makes no sense")
    identity, control, figures, layers = sections
    return Header(size, identity, control, figures, layers, layer_bytes, layer_count)


def identity(data: bytes) -> Identity:
    """Of the bytes of its section."""
    pid, made_ns, commit, model = _take(_IDENTITY, data)
    return Identity(pid, made_ns / 1e9, _text(commit), _text(model))


def control(data: bytes) -> Control:
    """Of the bytes of its section."""
    generation, depth, threads, request, on, name = _take(_CONTROL, data)
    return Control(generation, depth, threads, request, on, _until_zero(name))


def control_bytes(wanted: Control) -> bytes:
    """All of the section but its first 4 bytes, the generation."""
    packed = _CONTROL.pack(
        0,
        wanted.depth,
        wanted.threads,
        wanted.trace_request,
        wanted.trace_on,
        wanted.trace_file,
    )
    return packed[4:]


def sequence(data: bytes) -> int:
    """The number of the sequence lock: the first 8 bytes of the section with the figures."""
    (number,) = _take(struct.Struct("<Q"), data)
    return int(number)


def figures(data: bytes) -> Figures:
    """Of the bytes of its section, the sequence number included."""
    words = _take(_FIGURES, data)
    end = 1 + _FIGURE_COUNT
    values = (*words[1:end], words[end:-1], _text(words[-1]))
    return Figures(*values)


def layers(data: bytes, layout: Header) -> tuple[Layer, ...]:
    """Of the bytes of its section."""
    if len(data) < layout.layer_count * layout.layer_bytes:
        raise NotSo("the page is too short")
    return tuple(
        Layer(*_LAYER.unpack_from(data, row * layout.layer_bytes))
        for row in range(layout.layer_count)
    )


def _take(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise NotSo("the page is too short")
    return form.unpack_from(data)


def _until_zero(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _text(data: bytes) -> str:
    return _until_zero(data).decode("utf-8", "backslashreplace")
