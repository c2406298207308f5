"""One daemon a board: a lock file that lasts as long as its holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from moetuner.board.sysroot import SysRoot
from moetuner.errors import NotSo, SystemRefused, reason

PATH = "/run/moetuner/daemon.lock"


@contextlib.contextmanager
def only_one(root: SysRoot, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the lock. NotSo names the daemon that has it; SystemRefused without access.

    `wait_s`: how long to wait for it. A killed daemon holds it until the kernel has taken
    its probes out, which was seen to take 0.1 s.
    """
    path = root.path(PATH)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SystemRefused(f"cannot open {path}: {reason(error)}", "run with sudo") from error
    try:
        deadline = time.monotonic() + wait_s
        while not _lock(fd):
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise NotSo(
                f"a moetuner daemon is running (pid {holder if holder.isdigit() else 'unknown'})",
                "systemctl stop moetuner ends it",
            )
        # Its content only helps people; a full /run must not keep the daemon from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
