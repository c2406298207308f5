"""Tells at once when any process maps a new executable file.

The source is the kernel's own record of executable mappings (PERF_RECORD_MMAP2 of a
dummy software event on each cpu): present since Linux 3.16, without tracefs, kprobes,
BTF or headers, and it sees what an exec event cannot: a library that a running program
loads with dlopen. A record carries device, inode and process; a file that was seen
before costs one look-up in a set.

Under a fork storm records would wake the daemon thousands of times a second, so after
each reading the source rests: `REST_S` after one that found a new file (a program's
libraries follow it within milliseconds), doubled after each that found nothing new, up
to `LONG_REST_S`. A new file is still noticed well within a second. Records that did not
fit the buffer are counted; the watcher rescans then.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from moetuner.errors import MissingRequirement, reason
from moetuner.watch import kernel

REST_S = 0.1
LONG_REST_S = 0.4
PAGES = 32  # data pages a cpu: 128 KiB, about 1,000 records
_RECORD_LOST, _RECORD_MMAP2 = 2, 10
_HEADER = struct.Struct("<IHH")
_MMAP2 = struct.Struct("<IIQQQIIQQII")
_PROT_EXEC = 4
# Offsets in struct perf_event_mmap_page
_DATA_HEAD, _DATA_TAIL = 1024, 1032
_SEEN_LIMIT = 8192


@dataclass(frozen=True)
class Mapping:
    """One executable mapping of a file, with the file's identity as the kernel has it."""

    pid: int
    start: int
    length: int
    identity: tuple[int, int, int, int]  # device major, minor, inode, generation
    path: str  # as the process saw it; may mean another file in our mount namespace


class _Ring:
    """One cpu's buffer. Owner: the daemon's only thread."""

    def __init__(self, cpu: int) -> None:
        attr = kernel.PerfEventAttr(
            type=kernel.PERF_TYPE_SOFTWARE,
            config=kernel.PERF_COUNT_SW_DUMMY,
            flags=kernel.ATTR_MMAP | kernel.ATTR_MMAP2 | kernel.ATTR_WATERMARK,
            wakeup=1,  # bytes: each record wakes
        )
        self.fd = kernel.perf_event_open(attr, -1, cpu)
        try:
            self._map = mmap.mmap(self.fd, (1 + PAGES) * mmap.PAGESIZE)
        except OSError:
            os.close(self.fd)
            raise
        self._words = memoryview(self._map).cast("Q")
        # release → acquire is a full barrier on every supported machine (an acquire is
        # ordered after an earlier release): head is read before the data it covers, and
        # the data before tail gives the space back. On x86 it costs 50 ns for nothing.
        self._fence = threading.Lock()
        self._fence.acquire()

    def _barrier(self) -> None:
        self._fence.release()
        self._fence.acquire()

    @property
    def pending(self) -> bool:
        """Whether there are records that were not read."""
        return bool(self._words[_DATA_HEAD // 8] != self._words[_DATA_TAIL // 8])

    def read(self) -> bytes:
        """The records since last time, in one piece."""
        tail = self._words[_DATA_TAIL // 8]
        head = self._words[_DATA_HEAD // 8]
        self._barrier()
        size = PAGES * mmap.PAGESIZE
        if head == tail:
            return b""
        first, last = tail % size, head % size
        base = mmap.PAGESIZE
        if first < last:
            data = self._map[base + first : base + last]
        else:
            data = self._map[base + first : base + size] + self._map[base : base + last]
        self._barrier()
        self._words[_DATA_TAIL // 8] = head
        return data

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class Mappings:
    """All cpus' buffers. `filenos` are readable when something was mapped."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int, int, int]] = set()
        self.lost = 0
        self._cpus, self._rings = _open()

    @property
    def stale(self) -> bool:
        """Whether other processors are online than when the buffers were opened."""
        return _online() != self._cpus

    def reopen(self) -> None:
        """Buffers for the processors that are online now. One that went away takes its
        buffer's event along, even if it comes back: nvpmodel does that to a board's.

        MissingRequirement leaves the old ones.
        """
        old = self._rings
        self._cpus, self._rings = _open()
        for ring in old:
            ring.close()

    def filenos(self) -> list[int]:
        return [ring.fd for ring in self._rings]

    @property
    def pending(self) -> bool:
        """Whether there is something to read. The kernel tells a descriptor's poller of it once
        only, and adding the descriptor to an epoll already is a poll: ask after that."""
        return any(ring.pending for ring in self._rings)

    def read(self) -> Iterator[Mapping]:
        """Mappings of files that were not seen before, oldest first for each cpu."""
        for ring in self._rings:
            yield from self._decode(ring.read())

    def _decode(self, data: bytes) -> Iterator[Mapping]:
        at = 0
        while at + _HEADER.size <= len(data):
            kind, _, size = _HEADER.unpack_from(data, at)
            body, at = at + _HEADER.size, at + size
            if size < _HEADER.size:
                return  # not possible from the kernel; would not end
            if kind == _RECORD_LOST:
                self.lost += struct.unpack_from("<QQ", data, body)[1]
            elif kind == _RECORD_MMAP2:
                pid, _, start, length, _, major, minor, inode, generation, prot, _ = (
                    _MMAP2.unpack_from(data, body)
                )
                identity = (major, minor, inode, generation)
                if not prot & _PROT_EXEC or inode == 0 or identity in self._seen:
                    continue
                if len(self._seen) >= _SEEN_LIMIT:
                    self._seen.clear()
                self._seen.add(identity)
                name = data[body + _MMAP2.size : at].split(b"\0", 1)[0]
                yield Mapping(pid, start, length, identity, os.fsdecode(name))

    def forget(self) -> None:
        """Every file counts as new again (after one was let go)."""
        self._seen.clear()

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        self._rings.clear()


def _open() -> tuple[set[int], list[_Ring]]:
    """The processors that are online, and a buffer for each."""
    cpus = _online()
    rings: list[_Ring] = []
    try:
        for cpu in sorted(cpus):
            rings.append(_Ring(cpu))
    except OSError as error:
        for ring in rings:
            ring.close()
        raise MissingRequirement(
            f"the kernel does not tell of new mappings: {reason(error)}",
            "root (CAP_SYS_ADMIN or CAP_PERFMON) and CONFIG_PERF_EVENTS are needed",
        ) from error
    return cpus, rings


def _online() -> set[int]:
    try:
        with open("/sys/devices/system/cpu/online") as file:
            text = file.read().strip()
    except OSError:
        return os.sched_getaffinity(0)
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
