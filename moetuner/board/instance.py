"""One daemon a board: a lock file that lasts as long as its holder.

A killed process holds its lock until the kernel has closed its descriptors, probes among
them, which takes a tenth of a second for each: it is dead all the same, and said to be
by having no executable any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from moetuner.board.sysroot import SysRoot
from moetuner.errors import MissingRequirement, NotSo, SystemRefused, reason

PATH = "/run/moetuner/daemon.lock"


@contextlib.contextmanager
def only_one(root: SysRoot, *, wait_s: float = 60.0) -> Iterator[None]:
    """Holds the lock; waits up to `wait_s` for a holder that has been killed to be gone.

    NotSo names the daemon that has it; SystemRefused without access.
    """
    with _opened(root) as fd:
        deadline = time.monotonic() + wait_s
        while not _lock(fd):
            holder = _holder(fd)
            if alive(holder) or time.monotonic() > deadline:
                raise _running(holder)
            time.sleep(0.02)
        # Its content only helps people; a full /run must not keep the daemon from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield


@contextlib.contextmanager
def nobody_alive(root: SysRoot) -> Iterator[None]:
    """As only_one, but a holder that has been killed is as good as gone: for putting back
    what it left without waiting for its end."""
    with _opened(root) as fd:
        if not _lock(fd) and alive(_holder(fd)):
            raise _running(_holder(fd))
        yield


@contextlib.contextmanager
def _opened(root: SysRoot) -> Iterator[int]:
    path = root.path(PATH)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except PermissionError as error:
        raise MissingRequirement(
            f"cannot open {path}: {reason(error)}", "this needs root: run with sudo"
        ) from error
    except OSError as error:
        raise SystemRefused(f"cannot open {path}: {reason(error)}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(fd: int) -> int | None:
    text = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() else None


def alive(pid: int | None) -> bool:
    """False once the process has let its program go, on its way out or as a zombie.

    None, a holder that could not write its pid down (a full /run), is taken to live. So is
    another user's process, about which /proc may say nothing (hidepid).
    """
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
        os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _running(pid: int | None) -> NotSo:
    return NotSo(
        f"a moetuner daemon is running (pid {pid or 'unknown'})", "systemctl stop moetuner ends it"
    )
