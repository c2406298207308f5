"""Discovery: what came while it rested is found without further events."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from typing import Any, cast

from moetuner.watch.discovery import Discovery
from moetuner.watch.mappings import LONG_REST_S, Mapping


class _Mappings:
    """A kernel that tells of a record once, by a byte in a pipe, as perf events do."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.records: list[Mapping] = []
        self.reads = 0
        self.lost = 0
        self.stale = False

    @property
    def pending(self) -> bool:
        return bool(self.records)

    def filenos(self) -> list[int]:
        return [self.reader]

    def read(self) -> Iterator[Mapping]:
        self.reads += 1
        records, self.records = self.records, []
        yield from records

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class _Nobody:
    """Neither processes nor files are there."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: ()

    def mapped_file(self, pid: int, start: int, end: int) -> str:
        return f"/nonexistent/{pid}/{start:x}-{end:x}"


def test_what_came_during_a_rest_is_read_at_its_end_and_only_then() -> None:
    now = 100.0
    mappings, selector = _Mappings(), selectors.EpollSelector()
    nobody = cast(Any, _Nobody())
    discovery = Discovery(
        nobody, cast(Any, mappings), nobody, selector, lambda: now, lambda *arguments: None
    )
    discovery.configure((), 3600.0)
    discovery.tick()
    record = Mapping(1, 0x1000, 0x1000, (8, 1, 2, 3), "/nonexistent/lib.so")
    mappings.records.append(record)
    os.write(mappings.writer, b"x")
    for key, _ in selector.select(0):
        key.data()
    assert mappings.reads == 1
    os.read(mappings.reader, 1)
    mappings.records.append(record)  # the kernel's only word of it is lost
    discovery.tick()
    assert mappings.reads == 1  # it rests
    now += LONG_REST_S
    discovery.tick()
    assert mappings.reads == 2
    now += LONG_REST_S
    discovery.tick()
    assert mappings.reads == 2  # nothing new: no reason to look
    discovery.close()
    selector.close()
