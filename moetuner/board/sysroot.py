"""The one accessor for files under a board's root: /sys, /proc, /run.

A board is a directory. On a real one it is `/`; a simulated board is the same
code on another tree. Every error names the path, the value and the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from moetuner.errors import SystemRefused, reason

# A device that goes away answers with any of these, by the moment it is asked in.
_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR, errno.ESTALE}


class Missing(SystemRefused):
    """The file is not there, or its device went away."""


class Untrusted(SystemRefused):
    """A state file that is not of our own making; nothing in it may be believed."""


class SysRoot:
    """Reads and writes small text files below `root` (bytes ≤ 64 KiB, UTF-8)."""

    LIMIT = 64 * 1024

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)
        # Making a Path costs as much as reading the file, and a token waits for the floor.
        # The names are a fixed few hundred.
        self._paths: dict[str, Path] = {}

    def path(self, name: str | os.PathLike[str]) -> Path:
        """`/sys/x` → `ROOT/sys/x`; a path that is relative is taken below root too."""
        text = str(name)
        path = self._paths.get(text)
        if path is None:
            path = self._paths[text] = self.root / text.lstrip("/")
        return path

    def read(self, name: str | os.PathLike[str]) -> str:
        """Text of the file without surrounding white space and NULs.

        Raises Missing if it is not there, SystemRefused if it cannot be read.
        """
        path = self.path(name)
        try:
            data = self._load(path)
        except OSError as error:
            raise _refused(f"cannot read {path}", error) from error
        # Device-tree properties end in a NUL.
        return data.decode("utf-8", "replace").strip("\0 \t\r\n")

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
            raise SystemRefused(
                f"{self.path(name)} holds {text[:60]!r}, not a whole number"
            ) from None

    def read_int_optional(self, name: str | os.PathLike[str]) -> int | None:
        """As read_int; None when there is no number to be had now."""
        try:
            return self.read_int(name)
        except SystemRefused:
            return None

    def write(self, name: str | os.PathLike[str], value: str) -> None:
        """One write(2) of `value` to an existing file; Missing or SystemRefused on failure.

        O_CREAT is not given: a sysfs attribute that is gone must not become a file.
        """
        path = self.path(name)
        try:
            self._store(path, value.encode())
        except OSError as error:
            raise _refused(f"cannot write {value} to {path}", error) from error

    def exists(self, name: str | os.PathLike[str]) -> bool:
        return self.path(name).exists()

    def children(self, name: str | os.PathLike[str]) -> list[str]:
        """Names in a directory, sorted; empty when it is not there."""
        try:
            return sorted(self._list(self.path(name)))
        except OSError:
            return []

    def replace(self, name: str | os.PathLike[str], text: str) -> None:
        """Puts `text` into a file of our own, all or nothing, on disk before it returns.

        The directory is made if need be. SystemRefused (`No space left on device`)
        leaves the file as it was.
        """
        path = self.path(name)
        directory, _, base = str(name).rpartition("/")
        # One fixed name, so that crashes cannot pile up files. There is one writer.
        temporary = self.path(f"{directory}/.{base}.new")
        parent = self.path(directory)
        try:
            try:
                fd = _create(temporary)
            except FileNotFoundError:
                parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                fd = _create(temporary)
            try:
                data = text.encode()
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(path)
            _sync_directory(parent)
        except OSError as error:
            raise _refused(f"cannot write {path}", error) from error

    def read_state(self, name: str | os.PathLike[str], limit: int) -> str:
        """Text of a file that `replace` wrote.

        Raises Missing, SystemRefused, or Untrusted when it is a link, no regular
        file, another user's, writable by others, or longer than `limit` bytes.
        """
        path = self.path(name)
        try:
            # O_NONBLOCK: a FIFO in its place must not stop us.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                problem = _distrust(status, limit)
                if problem:
                    raise Untrusted(f"{path} {problem}")
                return os.read(fd, limit + 1).decode("utf-8", "replace")
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Untrusted(f"{path} is a symbolic link") from error
            raise _refused(f"cannot read {path}", error) from error

    def remove(self, name: str | os.PathLike[str]) -> None:
        """Deletes a file of our own and makes that durable; nothing if it is not there."""
        path = self.path(name)
        try:
            path.unlink()
            _sync_directory(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _refused(f"cannot remove {path}", error) from error

    def _load(self, path: Path) -> bytes:
        # Not path.open: a buffered file costs four times as much, and raising the floor
        # reads four of them while a token waits.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, self.LIMIT)
        finally:
            os.close(fd)

    def _store(self, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def _list(self, path: Path) -> list[str]:
        return os.listdir(path)


def _refused(what: str, error: OSError) -> SystemRefused:
    kind = Missing if error.errno in _GONE else SystemRefused
    return kind(f"{what}: {reason(error)}")


def _distrust(status: os.stat_result, limit: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return "is writable by others"
    if status.st_size > limit:
        return f"is longer than {limit} bytes"
    return None


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
