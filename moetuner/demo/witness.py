"""A second, independent observer of the calls: the kernel's own uprobe events.

The demonstration must not take the daemon's word for when a call began. A uprobe
event in tracefs stamps each call with the monotonic clock, which is the clock that
Python's time.monotonic reads, so both can stand on one time line.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from moetuner.errors import MissingRequirement, SystemRefused, reason

FUNCTIONS = ("llama_decode", "llama_process", "llama_synchronize")
# `llama-server-4711    [001] .....  1234.567890: llama_process: (0x7f…)`
_LINE = re.compile(r"^\s*.+-(\d+)\s+\[\d+\]\s+\S+\s+(\d+\.\d+): (\w+): ")


@dataclass(frozen=True)
class Call:
    """Entry of a function; `at` in seconds of the monotonic clock, 1 µs resolution."""

    at: float
    thread: int
    function: str


def parse_line(line: str) -> Call | None:
    """A line of trace_pipe; None for anything else (lost-event notes, headers)."""
    match = _LINE.match(line)
    return Call(float(match[2]), int(match[1]), match[3]) if match else None


def file_offset(library: Path, symbol: str) -> int | None:
    """Where the function's code begins in the file; None if it is not exported."""
    try:
        with library.open("rb") as file:
            elf = ELFFile(file)
            table = elf.get_section_by_name(".dynsym")
            found = table.get_symbol_by_name(symbol) if table else None
            if not found or found[0]["st_shndx"] == "SHN_UNDEF":
                return None
            address = found[0]["st_value"]
            for segment in elf.iter_segments():
                start, size = segment["p_vaddr"], segment["p_filesz"]
                if segment["p_type"] == "PT_LOAD" and start <= address < start + size:
                    return int(address - start + segment["p_offset"])
    except (OSError, ELFError) as error:
        raise SystemRefused(f"cannot read {library}: {error}") from error
    return None


class Witness:
    """Reports every call into `library`, from start to stop.

    `heard` is called in a thread of its own. Raises MissingRequirement where tracefs
    or uprobe events are not to be had. Leaves nothing behind: the events, the trace
    instance and the private mount are removed by `stop`.
    """

    def __init__(self, library: Path, heard: Callable[[Call], None]) -> None:
        self._library = library
        self._heard = heard
        self._group = f"moetuner_demo_{os.getpid()}"
        self._mount: Path | None = None
        self._events: list[str] = []
        self._instance: Path | None = None
        self._stop_read = self._stop_write = -1
        self._thread: threading.Thread | None = None
        self.lost = False

    def start(self) -> None:
        if re.search(r"\s", str(self._library)):
            raise MissingRequirement("a uprobe event cannot name a path with white space")
        self._stop_read, self._stop_write = os.pipe()
        self._mount = self._mount_tracefs()
        try:
            for name in FUNCTIONS:
                offset = file_offset(self._library, name)
                if offset is not None:
                    event = f"p:{self._group}/{name} {self._library}:{offset:#x}\n"
                    self._define(event)
                    self._events.append(name)
            if not self._events:
                raise MissingRequirement(f"{self._library} exports none of {', '.join(FUNCTIONS)}")
            instance = self._mount / "instances" / self._group
            instance.mkdir()
            self._instance = instance
            (instance / "trace_clock").write_text("mono")
            (instance / "buffer_size_kb").write_text("512")
            pipe = os.open(instance / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
            self._thread.start()
            (instance / "events" / self._group / "enable").write_text("1")
        except OSError as error:
            self.stop()
            raise MissingRequirement(f"no uprobe events: {reason(error)}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Undoes whatever `start` did, as far as it came."""
        os.write(self._stop_write, b"x")
        if self._instance:
            (self._instance / "events" / self._group / "enable").write_text("0")
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._instance:
            self._instance.rmdir()
            self._instance = None
        for name in self._events:
            self._define(f"-:{self._group}/{name}\n")
        self._events = []
        if self._mount:
            _libc().umount2(os.fsencode(self._mount), 2)  # MNT_DETACH
            self._mount.rmdir()
            self._mount = None
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _mount_tracefs(self) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="moetuner-tracefs-"))
        if _libc().mount(b"nodev", os.fsencode(directory), b"tracefs", 0, None) != 0:
            error = os.strerror(ctypes.get_errno())
            directory.rmdir()
            raise MissingRequirement(f"tracefs cannot be mounted: {error}")
        return directory

    def _define(self, event: str) -> None:
        """Adds or removes one event. O_APPEND keeps the others; the file cannot seek."""
        assert self._mount is not None
        fd = os.open(self._mount / "uprobe_events", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, event.encode())
        finally:
            os.close(fd)

    def _read(self, pipe: int) -> None:
        rest = b""
        try:
            while True:
                ready, _, _ = select.select([pipe, self._stop_read], [], [])
                if self._stop_read in ready:
                    return
                try:
                    rest += os.read(pipe, 64 * 1024)
                except BlockingIOError:
                    continue
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if call := parse_line(line.decode("utf-8", "replace")):
                        self._heard(call)
                    elif b"LOST" in line:
                        self.lost = True
        finally:
            os.close(pipe)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
