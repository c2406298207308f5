"""Finds the pages of running engines, reads them, writes wishes into them.

A page is an anonymous file (memfd) that the engine's process has open; who may look into
that process can open it through /proc/PID/fd. It is read and written by system calls and
never mapped: a stranger could cut an unsealed one, and the reader would die of SIGBUS. Each
read(2) takes a reference on the page's memory, an atomic operation that orders what is
before and after it on every architecture: so three calls, number, figures, number, see the
sequence lock as its writer means it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moetuner.errors import MoetunerError, NotSo, SystemRefused, reason
from moetuner.serve import page
from moetuner.serve.page import Control, Figures, Header, Identity, Layer

LINK = "/memfd:moetuner-experts (deleted)"
# A publication takes microseconds: one that is still under way after this will not end.
PATIENCE_S = 1.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PROC = Path("/proc")


@dataclass(frozen=True)
class Snapshot:
    """A page at one moment: `figures` and `layers` belong to the same publication."""

    identity: Identity
    control: Control
    figures: Figures
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Engine:
    """One cache of one process. `name`: the process's, as it calls itself."""

    pid: int
    name: str
    file: Path  # below /proc/PID/fd
    key: tuple[int, int]  # device and inode of the page

    def read(self) -> Snapshot:
        """NotSo: the process or its model is gone, it stands in the middle of an update, or
        the page is none that we know."""
        with _opened(self.file, os.O_RDONLY, self.key) as fd:
            return read(fd)

    def control(
        self,
        *,
        depth: int | None = None,
        threads: int | None = None,
        trace: bytes | None = None,
    ) -> int:
        """Writes wishes; what is None stays. `trace`: a path; empty to stop.

        Returns the generation that Figures.applied has once the engine has seen them, which
        it does at its next operation.
        """
        with _opened(self.file, os.O_RDWR, self.key) as fd:
            return write(fd, depth=depth, threads=threads, trace=trace)


def find(proc: Path = _PROC) -> list[Engine]:
    """The caches of all processes that we may look into, by pid.

    A page that several processes have open (a child, or who reads it) is the process's that
    made it.
    """
    mount = _mount_of_memfds()
    found: dict[tuple[int, int], Engine] = {}
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if pid == os.getpid():
            continue
        for engine in _pages_of(proc, pid, mount):
            known = found.get(engine.key)
            if known is None or _made_by(proc, engine) > _made_by(proc, known):
                found[engine.key] = engine
    return sorted(found.values(), key=lambda engine: (engine.pid, engine.key))


def _pages_of(proc: Path, pid: int, mount: bytes) -> Iterator[Engine]:
    directory = proc / str(pid) / "fd"
    seen = set()
    try:
        names = os.listdir(directory)
    except OSError:
        return  # gone, or another user's
    for name in names:
        file = directory / name
        try:
            # A stranger may call any file so, in a mount namespace of his own: a pipe, or one
            # on a file system that never answers. Only what is a memfd for sure is touched.
            if os.readlink(file) != LINK or _mount(proc / str(pid) / "fdinfo" / name) != mount:
                continue
            status = os.stat(file)
        except OSError:
            continue
        key = (status.st_dev, status.st_ino)
        if key not in seen:
            seen.add(key)
            yield Engine(pid, _comm(proc, pid), file, key)


def _mount(fdinfo: Path) -> bytes | None:
    found = re.search(rb"^mnt_id:\s*(\d+)$", fdinfo.read_bytes(), re.MULTILINE)
    return found[1] if found else None


def _mount_of_memfds() -> bytes:
    """The kernel's own mount that all memfds of the machine are in; nobody else's files are."""
    fd = os.memfd_create("moetuner")
    try:
        mount = _mount(_PROC / "self" / "fdinfo" / str(fd))
    finally:
        os.close(fd)
    if mount is None:
        raise SystemRefused("/proc/self/fdinfo tells no mnt_id")
    return mount


def _comm(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_bytes().rstrip(b"\n").decode("utf-8", "replace")
    except OSError:
        return "?"


def _made_by(proc: Path, engine: Engine) -> bool:
    """Whether the page says that this process made it."""
    try:
        own = engine.read().identity.pid
        text = (proc / str(engine.pid) / "status").read_text(errors="replace")
    except (MoetunerError, OSError):
        return False
    numbers = [line.split()[1:] for line in text.splitlines() if line.startswith("NSpid:")]
    return bool(numbers and numbers[0]) and numbers[0][-1] == str(own)


@contextlib.contextmanager
def _opened(file: Path, mode: int, key: tuple[int, int]) -> Iterator[int]:
    try:
        fd = os.open(file, mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ESRCH)
        kind = NotSo if gone else SystemRefused
        raise kind("the engine is gone" if gone else f"{file}: {reason(error)}") from error
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != key:
            raise NotSo("the engine is gone")  # the number is another file's by now
        yield fd
    except OSError as error:
        raise SystemRefused(f"{file}: {reason(error)}") from error
    finally:
        os.close(fd)


def read(fd: int, patience_s: float = PATIENCE_S) -> Snapshot:
    """An open page; see Engine.read."""
    layout = _header(fd)
    identity = page.identity(_part(fd, layout.identity))
    deadline = time.monotonic() + patience_s
    while True:
        before = page.sequence(_part(fd, layout.figures))
        if before % 2 == 0:
            figures = page.figures(_part(fd, layout.figures))
            rows = page.layers(_part(fd, layout.layers), layout)
            if page.sequence(_part(fd, layout.figures)) == before:
                control = page.control(_part(fd, layout.control))
                return Snapshot(identity, control, figures, rows)
        if time.monotonic() > deadline:
            raise NotSo(
                "the engine stopped in the middle of an update",
                "the process was stopped (SIGSTOP) or is dying",
            )
        time.sleep(0.0005)


def write(
    fd: int,
    *,
    depth: int | None = None,
    threads: int | None = None,
    trace: bytes | None = None,
    patience_s: float = PATIENCE_S,
) -> int:
    """An open page; see Engine.control. One writer at a time: the page is locked (flock)."""
    layout = _header(fd)
    section = layout.control
    _lock(fd, patience_s)
    old = page.control(_part(fd, section))
    wanted = old
    if depth is not None:
        wanted = replace(wanted, depth=depth)
    if threads is not None:
        wanted = replace(wanted, threads=threads)
    if trace is not None:
        request = (old.trace_request + 1) % (1 << 32)
        wanted = replace(wanted, trace_request=request, trace_on=int(bool(trace)), trace_file=trace)
    # Odd while it is written, also if whoever wrote last died in the middle of it.
    writing = old.generation | 1
    done = (writing + 1) % (1 << 32)
    os.pwrite(fd, writing.to_bytes(4, "little"), section.offset)
    os.pwrite(fd, page.control_bytes(wanted), section.offset + 4)
    os.pwrite(fd, done.to_bytes(4, "little"), section.offset)
    return done


def _lock(fd: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise NotSo("someone else controls this engine at the moment") from error
        time.sleep(0.01)


def _header(fd: int) -> Header:
    """NotSo if it is no page, or one that could change its size while we use it."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise NotSo("it is not a page of the expert cache") from error
    if seals & _SEALS != _SEALS:
        raise NotSo("the page is still being made")
    layout = page.header(os.pread(fd, page.HEADER_BYTES, 0))
    if os.fstat(fd).st_size < layout.bytes:
        raise NotSo("the page is too short")
    return layout


def _part(fd: int, section: page.Section) -> bytes:
    return os.pread(fd, section.bytes, section.offset)
