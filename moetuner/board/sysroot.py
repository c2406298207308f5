"""The one accessor for files under a board's root: /sys, /proc, /run.

A board is a directory. On a real one it is `/`; a simulated board is the same
code on another tree. Every error names the path, the value and the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

from moetuner.errors import SystemRefused, reason


class SysRoot:
    """Reads and writes small text files below `root` (bytes ≤ 64 KiB, UTF-8)."""

    LIMIT = 64 * 1024

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, name: str | os.PathLike[str]) -> Path:
        """`/sys/x` → `ROOT/sys/x`; a path that is relative is taken below root too."""
        return self.root / str(name).lstrip("/")

    def read(self, name: str | os.PathLike[str]) -> str:
        """Text of the file without surrounding white space; SystemRefused if it cannot be read."""
        path = self.path(name)
        try:
            with path.open("rb") as file:
                return file.read(self.LIMIT).decode("utf-8", "replace").strip()
        except OSError as error:
            raise SystemRefused(f"cannot read {path}: {reason(error)}") from error

    def read_optional(self, name: str | os.PathLike[str]) -> str | None:
        """As read; None when the file is not there, not readable or has no data now."""
        try:
            return self.read(name)
        except SystemRefused:
            return None

    def read_int(self, name: str | os.PathLike[str]) -> int:
        """The file's decimal integer; SystemRefused names what stood there instead."""
        text = self.read(name)
        try:
            return int(text)
        except ValueError:
            raise SystemRefused(f"{self.path(name)} holds {text!r}, not a whole number") from None

    def write(self, name: str | os.PathLike[str], value: str) -> None:
        """One write(2) of `value` to an existing file; SystemRefused on failure.

        O_CREAT is not given: a sysfs attribute that is gone must not become a file.
        """
        path = self.path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)
        except OSError as error:
            raise SystemRefused(f"cannot write {value} to {path}: {reason(error)}") from error

    def exists(self, name: str | os.PathLike[str]) -> bool:
        return self.path(name).exists()

    def children(self, name: str | os.PathLike[str]) -> list[str]:
        """Names in a directory, sorted; empty when it is not there."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []
