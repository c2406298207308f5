"""Conditions for comparisons on a machine with more memory than a board: a memory limit
that page cache and server share, a cold page cache, a read-ahead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetuner.demo.services import LlamaServer
from moetuner.errors import MissingRequirement, SystemRefused, reason

CGROUP = Path("/sys/fs/cgroup")
SYSTEMD = Path("/run/systemd/system")  # systemd runs here (sd_booted)
EMPTY_S = 5.0


@dataclass(frozen=True)
class Limited:
    """Where a memory limit holds; put `prefix` before a command to run it there."""

    prefix: tuple[str, ...]


@contextlib.contextmanager
def memory_limit(name: str, size: int) -> Iterator[Limited]:
    """A control group of `size` bytes without swap, removed at the end; its processes must
    have ended by then. Under systemd each command gets a scope of its own.

    MissingRequirement: no right to make one, or no memory controller.
    """
    if SYSTEMD.is_dir():
        limit = [f"--property=MemoryMax={size}", "--property=MemorySwapMax=0"]
        yield Limited(("systemd-run", "--scope", "--quiet", "--collect", *limit, "--"))
        return
    group, files = _create(name, size)
    try:
        for file, value in files:
            (group / file).write_text(value)
        enter = f'echo 0 > "{group}/cgroup.procs" && exec "$@"'
        yield Limited(("sh", "-c", enter, "sh"))
    except OSError as error:
        raise MissingRequirement(f"cannot limit memory with {group}: {reason(error)}") from error
    finally:
        _remove(group)


def _create(name: str, size: int) -> tuple[Path, list[tuple[str, str]]]:
    first = CGROUP / "memory"
    if (first / "memory.limit_in_bytes").exists():
        # Version 1 has no swap limit without kernel option; no swap is used with this.
        group = first / name
        files = [("memory.limit_in_bytes", str(size)), ("memory.swappiness", "0")]
    else:
        group = CGROUP / name
        files = [("memory.max", str(size)), ("memory.swap.max", "0")]
    try:
        if not first.is_dir():
            (CGROUP / "cgroup.subtree_control").write_text("+memory")
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise MissingRequirement(
            f"cannot make a control group with a memory limit: {group}: {reason(error)}",
            "it takes root and a writable /sys/fs/cgroup",
        ) from error
    return group, files


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        (group / "memory.force_empty").write_text("0")
    deadline = time.monotonic() + EMPTY_S
    while time.monotonic() < deadline:  # an ended process leaves a moment later
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


def drop_page_cache(path: Path) -> None:
    """Forgets what the page cache holds of the file; nobody may have it mapped."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # pages that are not written back stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextlib.contextmanager
def cold_server(
    program: Path,
    model: Path,
    log: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    limit: int | None,
) -> Iterator[LlamaServer]:
    """A llama-server that is ready and began with nothing of its model in memory; stopped at the
    end. `limit`: bytes for it and its page cache; None: as many as there are."""
    drop_page_cache(model)
    with contextlib.ExitStack() as stack:
        prefix: tuple[str, ...] = ()
        if limit is not None:
            limited = memory_limit(f"moetuner-server-{os.getpid()}", limit)
            prefix = stack.enter_context(limited).prefix
        server = LlamaServer(program, model, log, arguments, env=env, prefix=prefix)
        stack.callback(server.stop)
        server.await_ready()
        yield server


def read_bytes(pid: int) -> int:
    """Bytes that disks had to give for the process so far, its page faults included."""
    text = Path(f"/proc/{pid}/io").read_text()
    return int(text.partition("read_bytes: ")[2].split()[0])


class ReadAhead:
    """read_ahead_kb of the device that a file lies on. Put back by `close`."""

    def __init__(self, path: Path) -> None:
        device = path.stat().st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        # The backing device's: it holds for whole disks, partitions and stacked devices.
        self._file = Path(f"/sys/class/bdi/{name}/read_ahead_kb")
        try:
            self.found_kb = int(self._file.read_text())
        except (OSError, ValueError) as error:
            raise MissingRequirement(f"{path} lies on no block device ({self._file})") from error

    def set(self, kb: int) -> None:
        try:
            self._file.write_text(str(kb))
        except OSError as error:
            raise SystemRefused(f"cannot write {kb} to {self._file}: {reason(error)}") from error

    def close(self) -> None:
        self.set(self.found_kb)
