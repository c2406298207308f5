"""inotify(7), which Python has no module for: tells when a file's content is written.

Works on sysfs attributes too: a write by any process through the file is an event there
(a change made inside the kernel is not).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from moetuner.errors import SystemRefused

_libc = ctypes.CDLL(None, use_errno=True)

IN_MODIFY = 0x2
IN_CLOSE_WRITE = 0x8
_HEADER = struct.Struct("iIII")


class Inotify:
    """Tells when a watched file's content is written. Pollable through `fileno`."""

    def __init__(self) -> None:
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise SystemRefused(f"inotify is not available: {os.strerror(code)}")

    def fileno(self) -> int:
        return int(self._fd)

    def add(self, path: str, mask: int) -> int:
        """A watch's number; OSError (ENOSPC when the user's watches are used up)."""
        number = _libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return int(number)

    def remove(self, number: int) -> None:
        _libc.inotify_rm_watch(self._fd, number)  # EINVAL: the file is gone, and so the watch

    def read(self) -> Iterator[tuple[int, int]]:
        """(watch, mask) of what happened since; nothing if nothing did."""
        try:
            data = os.read(self._fd, 64 * 1024)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            raise
        at = 0
        while at < len(data):
            number, mask, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size + length
            yield number, mask

    def close(self) -> None:
        os.close(self._fd)
