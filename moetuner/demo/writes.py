"""inotify(7) through the C library: wakes when a plain file was written.

For the simulated board only. Real sysfs attributes announce nothing here.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from pathlib import Path

from moetuner.errors import SystemRefused

IN_MODIFY = 0x2
IN_CLOSE_WRITE = 0x8
IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK


class Inotify:
    """Watches files for writes. Not for use from two threads at once."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK)
        if self._fd < 0:
            raise SystemRefused(f"inotify_init1: {os.strerror(ctypes.get_errno())}")
        self._paths: dict[int, Path] = {}

    def watch(self, path: Path, mask: int = IN_CLOSE_WRITE) -> None:
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(mask))
        if watch < 0:
            raise SystemRefused(f"cannot watch {path}: {os.strerror(ctypes.get_errno())}")
        self._paths[watch] = path

    def fileno(self) -> int:
        return int(self._fd)

    def wait(self, timeout_s: float | None = None) -> list[Path]:
        """The files written since the last call, each once; empty after the timeout."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        try:
            data = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return []
        found: dict[Path, None] = {}
        offset = 0
        while offset < len(data):
            watch, _mask, _cookie, length = struct.unpack_from("iIII", data, offset)
            offset += struct.calcsize("iIII") + length
            if watch in self._paths:
                found[self._paths[watch]] = None
        return list(found)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
