"""System calls that Python has no module for: perf events, the type of a file system.

Numbers and layouts are the kernel's UAPI (linux/perf_event.h, linux/magic.h).
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from moetuner.errors import MissingRequirement

_libc = ctypes.CDLL(None, use_errno=True)

_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PERF_FLAG_FD_CLOEXEC = 8
PERF_TYPE_SOFTWARE = 1
PERF_COUNT_SW_DUMMY = 9
_IOC_ENABLE = 0x2400
_IOC_SET_BPF = 0x40042408

ATTR_DISABLED = 1 << 0
ATTR_MMAP = 1 << 8
ATTR_WATERMARK = 1 << 14
ATTR_MMAP2 = 1 << 23


class PerfEventAttr(ctypes.Structure):
    """struct perf_event_attr, PERF_ATTR_SIZE_VER1 (72 bytes): all that is used here."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
        ("config2", ctypes.c_uint64),
    )


OVERLAYFS_SUPER_MAGIC = 0x794C7630


def is_overlay(fd: int) -> bool:
    """Whether the file lies on an overlay file system."""
    statfs = (ctypes.c_long * 32)()  # f_type comes first; the rest is 112 bytes
    return _libc.fstatfs(fd, statfs) == 0 and statfs[0] == OVERLAYFS_SUPER_MAGIC


def perf_event_open(attr: PerfEventAttr, pid: int, cpu: int) -> int:
    """A perf event's descriptor (close-on-exec); OSError as the kernel gives it."""
    number = _SYS_PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise MissingRequirement(
            f"no eBPF support for {platform.machine()}", "moetuner runs on aarch64 and x86_64"
        )
    attr.size = ctypes.sizeof(PerfEventAttr)
    fd = _libc.syscall(number, ctypes.byref(attr), pid, cpu, -1, PERF_FLAG_FD_CLOEXEC)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(fd)


def perf_ioctl(fd: int, request: int, argument: int) -> None:
    if _libc.ioctl(fd, ctypes.c_ulong(request), ctypes.c_ulong(argument)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True)
class UprobePmu:
    """The kernel's uprobe event source: its type number and the return-probe bit."""

    type: int
    retprobe_bit: int

    @classmethod
    def find(cls, base: Path = Path("/sys/bus/event_source/devices/uprobe")) -> UprobePmu:
        try:
            number = int((base / "type").read_text())
            # "config:0"
            bit = int((base / "format/retprobe").read_text().strip().removeprefix("config:"))
        except (OSError, ValueError):
            raise MissingRequirement(
                "this kernel has no uprobes",
                "it needs CONFIG_UPROBE_EVENTS and CONFIG_PERF_EVENTS (JetPack's kernel has both)",
            ) from None
        return cls(number, bit)

    def attach(self, path: str, offset: int, program_fd: int, *, on_return: bool) -> int:
        """Runs the program at `offset` bytes into the file, in every process; returns a descriptor.

        Closing the descriptor detaches. OSError: EACCES/EPERM without CAP_SYS_ADMIN (newer
        kernels) or CAP_PERFMON, EINVAL for an offset that is no instruction the kernel can
        probe, ENOENT for the path.
        """
        path_bytes = ctypes.create_string_buffer(os.fsencode(path))
        attr = PerfEventAttr(
            type=self.type,
            config=(1 << self.retprobe_bit) if on_return else 0,
            sample_period=1,
            wakeup=1,
            config1=ctypes.addressof(path_bytes),
            config2=offset,
        )
        # pid -1 with one cpu: a uprobe is in the file's page, so every cpu meets it.
        fd = perf_event_open(attr, -1, 0)
        try:
            perf_ioctl(fd, _IOC_SET_BPF, program_fd)
            perf_ioctl(fd, _IOC_ENABLE, 0)
        except OSError:
            os.close(fd)
            raise
        return fd
