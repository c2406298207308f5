"""One look at the llama.cpp files and processes of this moment, for `--check`.

It uses what the daemon uses (elf, inspector, places), but attaches nothing and works
without root, as far as the caller may look.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moetuner.log import printable
from moetuner.watch import elf, helper, layout
from moetuner.watch.places import Places
from moetuner.watch.processes import Process, ProcFs

TIMEOUT_S = 60


@dataclass(frozen=True)
class File:
    """A file that holds llama.cpp; `problem` says why it could not be watched."""

    path: str
    functions: tuple[str, ...]
    unclear: str | None
    pids: tuple[int, ...]
    problem: str | None = None


def survey(configured: Iterable[str]) -> tuple[list[File], list[Process]]:
    """Files that export the functions (in use, and configured), and who has them mapped."""
    proc = ProcFs()
    candidates: dict[tuple[int, int], tuple[str, str]] = {}  # identity → how to open, name
    pids: dict[tuple[int, int], set[int]] = {}
    for pattern in configured:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                candidates[status.st_dev, status.st_ino] = (path, path)
    for pid in proc.pids():
        for mapping in proc.executable_mappings(pid):
            opener = _opener(proc, pid, mapping.start, mapping.end, mapping.path)
            if opener is None:
                continue
            with contextlib.suppress(OSError):
                status = os.stat(opener)
                identity = (status.st_dev, status.st_ino)
                candidates.setdefault(identity, (opener, mapping.path))
                pids.setdefault(identity, set()).add(pid)
    files = []
    users: set[int] = set()
    for identity, (opener, path) in candidates.items():
        file = _examine(opener, path, tuple(sorted(pids.get(identity, ()))))
        if file is not None:
            files.append(file)
            users.update(file.pids)
    processes = [found for pid in sorted(users) if (found := proc.process(pid)) is not None]
    return files, processes


def _opener(proc: ProcFs, pid: int, start: int, end: int, path: str) -> str | None:
    """map_files for root; for others the path, inside the process's own root if possible."""
    for candidate in (
        str(proc.mapped_file(pid, start, end)),
        f"{proc.root}/{pid}/root{path}",
        path,
    ):
        if os.access(candidate, os.R_OK):
            return candidate
    return None


def _examine(opener: str, path: str, pids: tuple[int, ...]) -> File | None:
    shown = printable(path, 400)
    try:
        fd = os.open(opener, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not elf.may_export(fd, platform.machine()):
            return None
        answer = inspect(fd)
        places = Places.parse(json.loads(answer), os.fstat(fd).st_size)
    except (ValueError, TypeError, KeyError, RecursionError, subprocess.SubprocessError) as error:
        return File(shown, (), None, pids, f"cannot be examined: {printable(str(error))}")
    finally:
        os.close(fd)
    if not places.functions:
        return None
    names = tuple(name for name in layout.FUNCTIONS if name in places.functions)
    return File(shown, names, places.unclear, pids)


def inspect(fd: int) -> bytes:
    """The inspector's answer about an open file; subprocess.SubprocessError if it hangs."""
    return subprocess.run(
        helper.command("moetuner.watch.inspector", str(fd)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[fd],
        timeout=TIMEOUT_S,
        **helper.surroundings(),
    ).stdout


__all__ = ["File", "Path", "inspect", "survey"]
