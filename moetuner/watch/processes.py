"""What /proc says of other processes. Everything read here may be hostile or gone.

Errors are answers: a process can end between any two reads, so functions return None
or an empty value for "no longer there".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARGV_LIMIT = 1 << 20  # bytes; Linux allows 2 MiB of argv, a llama-server uses 2 KB
MAPS_LIMIT = 32 << 20  # bytes
_EXECUTABLE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$", re.MULTILINE
)


@dataclass(frozen=True)
class Process:
    """A process's own words about itself at one moment. `started`: clock ticks after boot."""

    pid: int
    started: int
    comm: str
    exe: str
    argv: tuple[str, ...]
    environ: dict[str, str]


@dataclass(frozen=True)
class ExecutableMapping:
    """A line of /proc/PID/maps: an executable mapping of a file."""

    pid: int
    start: int
    end: int
    device: tuple[int, int]
    inode: int
    path: str


class ProcFs:
    """`root` is where /proc is mounted (always the machine's own outside of tests)."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self.root = root

    def pids(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.root) if name.isdigit())

    def _read(self, name: str, limit: int = 4096) -> bytes | None:
        try:
            with open(self.root / name, "rb") as file:
                return file.read(limit)
        except OSError:
            return None

    def started(self, pid: int) -> int | None:
        """Start time in clock ticks; with the pid it names a process for good."""
        fields = self._stat(f"{pid}/stat")
        return int(fields[19]) if len(fields) > 19 else None

    def _stat(self, name: str) -> list[bytes]:
        """Fields of a stat file from the third (state) on; the name may hold anything."""
        data = self._read(name)
        return data.rpartition(b") ")[2].split() if data else []

    def process(self, pid: int) -> Process | None:
        started = self.started(pid)
        argv = self._read(f"{pid}/cmdline", ARGV_LIMIT)
        if started is None or argv is None:
            return None
        environ = self._read(f"{pid}/environ", ARGV_LIMIT) or b""
        pairs = (os.fsdecode(item).partition("=") for item in environ.split(b"\0") if item)
        return Process(
            pid,
            started,
            self.comm(pid),
            self.exe(pid),
            tuple(os.fsdecode(item) for item in argv.split(b"\0")[:-1]),
            {name: value for name, _, value in pairs},
        )

    def comm(self, pid: int) -> str:
        return (self._read(f"{pid}/comm") or b"?").rstrip(b"\n").decode("utf-8", "replace")

    def exe(self, pid: int) -> str:
        try:
            return os.readlink(self.root / str(pid) / "exe")
        except OSError:
            return ""

    def threads(self, pid: int) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self.root / str(pid) / "task")]
        except OSError:
            return []

    def thread_alive(self, pid: int, tid: int) -> bool:
        fields = self._stat(f"{pid}/task/{tid}/stat")
        return bool(fields) and fields[0] not in (b"Z", b"X")

    def stack_pointer(self, pid: int, tid: int) -> int | None:
        """Of a thread that waits in the kernel; None while it runs (or is not ours to see)."""
        fields = (self._read(f"{pid}/task/{tid}/syscall") or b"").split()
        try:
            return int(fields[-2], 16) if len(fields) >= 3 else None
        except ValueError:
            return None

    def cpu_ticks(self, pid: int) -> int | None:
        """User and system time of the whole process, in clock ticks."""
        fields = self._stat(f"{pid}/stat")
        return int(fields[11]) + int(fields[12]) if len(fields) > 12 else None

    def waits_for_disk(self, pid: int) -> bool:
        """Whether any of its threads is in uninterruptible sleep (reading experts, say)."""
        return any(
            self._stat(f"{pid}/task/{tid}/stat")[:1] == [b"D"] for tid in self.threads(pid)[:256]
        )

    def executable_mappings(self, pid: int) -> Iterator[ExecutableMapping]:
        data = self._read(f"{pid}/maps", MAPS_LIMIT) or b""
        for found in _EXECUTABLE.finditer(data):
            start, end, major, minor, inode, path = found.groups()
            if inode != b"0":
                yield ExecutableMapping(
                    pid,
                    int(start, 16),
                    int(end, 16),
                    (int(major, 16), int(minor, 16)),
                    int(inode),
                    path.decode("utf-8", "backslashreplace"),
                )

    def mapped_file(self, pid: int, start: int, end: int) -> Path:
        """The file behind a mapping, whatever its name, even deleted or in another mount
        namespace; opening it needs CAP_CHECKPOINT_RESTORE."""
        return self.root / str(pid) / "map_files" / f"{start:x}-{end:x}"
