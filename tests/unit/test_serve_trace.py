"""Router traces: read, cut off, damaged, not there.

./run-tests unit -k serve_trace
"""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetuner.errors import MissingRequirement, MoetunerError, NotSo, SystemRefused
from moetuner.serve import trace
from tests.support import pages

ROWS = [
    (4, 10, 1, 0, 0, 3, (0, 1)),
    (4, 10, 1, 0, 1, 3, (2, 1)),
    (4, 10, 1, 0, 2, 3, (7, 6)),
    (4, 11, 2, 0, 0, 1, (5, 4)),
    (6, 20, 1, 1, 0, 1, (3, 2)),
    (6, 21, 2, 0, 0, 1, (1, 0)),
]


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_rows(tmp_path: Path) -> None:
    read = trace.read(_write(tmp_path / "t", pages.trace(ROWS)))
    assert (read.model, read.commit, read.model_bytes) == ("/models/some.gguf", "abc1234", 5 << 30)
    assert (read.layers, read.experts, read.used, read.cut) == (3, 8, 2, 0)
    assert read.started == 1.7e9
    found = [
        (*(int(row[n]) for n in row.dtype.names[:6]), tuple(row["experts"])) for row in read.rows
    ]
    assert found == ROWS
    assert read.evaluations().tolist() == [(4, 10, 3), (6, 20, 1)]


@pytest.mark.parametrize("kept", [1, 19])
def test_a_cut_tail_is_left_out(tmp_path: Path, kept: int) -> None:
    read = trace.read(_write(tmp_path / "t", pages.trace(ROWS)[: 1024 + 2 * 20 + kept]))
    assert (len(read.rows), read.cut) == (2, kept)


def test_no_rows(tmp_path: Path) -> None:
    read = trace.read(_write(tmp_path / "t", pages.trace()))
    assert len(read.rows) == 0
    assert len(read.evaluations()) == 0


def test_later_headers_may_be_longer(tmp_path: Path) -> None:
    data = pages.trace(ROWS, header_bytes=1100)
    read = trace.read(_write(tmp_path / "t", data[:1024] + bytes(76) + data[1024:]))
    assert read.rows["experts"].tolist() == [list(row[6]) for row in ROWS]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"GGUF" + bytes(4000), "not a router trace"),
        (pages.trace()[:900], "cut off"),
        (pages.trace(version=2), "version 2"),
        (pages.trace(header_bytes=1023), "no sense"),
        (pages.trace(header_bytes=2**32 - 1), "no sense"),
        (pages.trace(used=0), "no sense"),
        (pages.trace(used=9), "no sense"),
        (pages.trace(used=2**30, row_bytes=16), "no sense"),
        (pages.trace(experts=2**32 - 1), "no sense"),
        (pages.trace(row_bytes=0), "no sense"),
        (pages.trace(row_bytes=19), "no sense"),
        (pages.trace([*ROWS, (7, 0, 0, 0, 0, 1, (8, 0))]), "row 6 is damaged"),
        (pages.trace([(7, 0, 0, 0, 1, 1, (0, 0))]), "row 0 is damaged"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, data: bytes, why: str) -> None:
    path = _write(tmp_path / "t", data)
    with pytest.raises(NotSo, match=rf"^{path}: .*{why}"):
        trace.read(path)


def test_a_file_of_a_tebibyte_costs_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "t", pages.trace(ROWS))
    os.truncate(path, 1 << 40)
    with pytest.raises(NotSo, match="row 6 is damaged"):
        trace.read(path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SystemRefused, match="No such file"):
        trace.read(tmp_path / "none")
    with pytest.raises(SystemRefused, match="directory"):
        trace.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotSo, match="empty"):
        trace.read(tmp_path / "pipe")


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object) -> object:
        if name == "numpy":
            raise ImportError(name)
        return real(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingRequirement, match="needs numpy"):
        trace.read(_write(tmp_path / "t", pages.trace(ROWS)))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "t"


@given(data=st.binary(max_size=3000), magic=st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_a_trace_or_an_error(scratch: Path, data: bytes, magic: bool) -> None:
    scratch.write_bytes((trace.MAGIC if magic else b"") + data)
    try:
        read = trace.read(scratch)
    except MoetunerError:
        return
    assert len(read.rows) * read.rows.dtype.itemsize <= len(data) + 8


@given(changes=st.lists(st.tuples(st.integers(0, 1143), st.binary(min_size=1, max_size=4))))
@settings(deadline=None, max_examples=200)
def test_any_damage_is_a_trace_or_an_error(scratch: Path, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(pages.trace(ROWS))
    for offset, part in changes:
        data[offset : offset + len(part)] = part
    scratch.write_bytes(data)
    try:
        read = trace.read(scratch)
        read.evaluations()
    except MoetunerError:
        return
    assert bool(np.all(read.rows["experts"] < read.experts))
