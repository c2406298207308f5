"""A file system that serves one model file and whose reads misbehave on demand.

    with serve(model, directory, Faults(after=100, errors=200)) as disk:
        run(disk.path)                 # errors begin with the 100th direct read
        disk.counts()                  # what was done
        disk.set(Faults())             # a sound disk again

The engine reads with O_DIRECT, the loader and the second try of a read do not: the server
sees which is which. It is a process of its own with several threads, so reads overtake
each other. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = 4096
NAME = "model.gguf"


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Nothing does before direct read number `after`.

    errors, refusals: of a thousand direct reads so many fail with EIO or EINVAL.
    delay_ms: direct reads take a random time up to this.
    stall_s: the first direct read then takes this long, and all others until it ends.
    bad: byte range whose pages nobody can read; only whole pages, so that what lies beside
    it in the file is safe. end: where the file ends for direct reads and for later ones.
    """

    after: int = 0
    errors: int = 0
    refusals: int = 0
    delay_ms: float = 0
    stall_s: float = 0
    bad: tuple[int, int] = (0, 0)
    end: int | None = None
    seed: int = 1


class Disk:
    """The parent's handle; each call is done when it returns."""

    def __init__(self, model: Path, mountpoint: Path, faults: Faults, direct: bool) -> None:
        self.path = mountpoint / NAME
        self._mountpoint = mountpoint
        mountpoint.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.faultfs", str(model), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        self._ask("direct", direct)
        self.set(faults)

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while not os.path.ismount(self._mountpoint):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the file system was not mounted")
            time.sleep(0.02)

    def _ask(self, command: str, *arguments: Any) -> Any:
        assert self._server.stdin and self._server.stdout
        print(json.dumps([command, *arguments]), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def set(self, faults: Faults) -> None:
        """From now on; reads are counted anew."""
        self._ask("set", asdict(faults))

    def counts(self) -> Counter[str]:
        """Since set(): direct, buffered, errors, refusals, delays, stalls, bad, cut."""
        return Counter(self._ask("counts"))

    def await_direct_reads(self, count: int) -> None:
        """Returns when there have been so many."""
        deadline = time.monotonic() + 60
        while self.counts()["direct"] < count:
            assert time.monotonic() < deadline, f"fewer than {count} direct reads"
            time.sleep(0.005)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self._mountpoint)], check=False)
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()


@contextlib.contextmanager
def serve(
    model: Path, directory: Path, faults: Faults | None = None, *, direct: bool = True
) -> Iterator[Disk]:
    """The model below a new mount in `directory`. `direct`: whether O_DIRECT is allowed."""
    disk = Disk(model, directory / f"disk-{time.monotonic_ns()}", faults or Faults(), direct)
    try:
        disk.wait()
        yield disk
    finally:
        disk.close()


class _Model:
    """What the reads get. Any thread."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self.direct_allowed = True
        self._lock = threading.Lock()
        self.set(Faults())

    def set(self, faults: Faults) -> None:
        with self._lock:
            self._faults = faults
            self._random = random.Random(faults.seed)
            self._counts: Counter[str] = Counter()
            self._stalled_until: float | None = None

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counts)

    def read(self, size: int, offset: int, direct: bool) -> bytes:
        with self._lock:
            self._counts["direct" if direct else "buffered"] += 1
            if self._counts["direct"] <= self._faults.after:
                return os.pread(self._fd, size, offset)
            end = self._faults.end
            wait, error = self._decide(size, offset, direct)
        if wait > 0:
            time.sleep(wait)
        if error:
            raise OSError(error, os.strerror(error))
        if end is not None and offset + size > end:
            size = max(0, end - offset)
            with self._lock:
                self._counts["cut"] += 1
        return os.pread(self._fd, size, offset)

    # The lock is held. Seconds to wait, and an errno.
    def _decide(self, size: int, offset: int, direct: bool) -> tuple[float, int]:
        faults = self._faults
        first = (faults.bad[0] + PAGE - 1) // PAGE * PAGE
        last = faults.bad[1] // PAGE * PAGE
        if first < last and offset < last and offset + size > first:
            self._counts["bad"] += 1
            return 0, errno.EIO
        if not direct:
            return 0, 0
        if faults.stall_s:
            now = time.monotonic()
            if self._stalled_until is None:
                self._stalled_until = now + faults.stall_s
            if now < self._stalled_until:
                self._counts["stalls"] += 1
                return self._stalled_until - now, 0
        wait = 0.0
        if faults.delay_ms:
            self._counts["delays"] += 1
            wait = self._random.random() * faults.delay_ms / 1000
        chance = self._random.randrange(1000)
        if chance < faults.errors:
            self._counts["errors"] += 1
            return wait, errno.EIO
        if chance < faults.errors + faults.refusals:
            self._counts["refusals"] += 1
            return wait, errno.EINVAL
        return wait, 0


def _serve(model: _Model, mountpoint: str) -> None:
    import mfusepy

    class Operations(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path != f"/{NAME}":
                raise mfusepy.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": model.size}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", NAME]

        def open(self, path: str, flags: int) -> int:
            direct = bool(flags & os.O_DIRECT)
            if direct and not model.direct_allowed:
                raise mfusepy.FuseOSError(errno.EINVAL)
            return int(direct)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return model.read(size, offset, bool(fh))

    def control() -> None:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            answer: object = None
            if command == "set":
                model.set(Faults(**arguments[0]))
            elif command == "counts":
                answer = model.counts()
            elif command == "direct":
                model.direct_allowed = arguments[0]
            print(json.dumps(answer), flush=True)

    threading.Thread(target=control, daemon=True).start()
    # kernel_cache: opening the file again must not drop its pages.
    mfusepy.FUSE(
        Operations(), mountpoint, foreground=True, nothreads=False, ro=True, kernel_cache=True,
        fsname="faultfs",
    )  # fmt: skip


if __name__ == "__main__":
    _serve(_Model(sys.argv[1]), sys.argv[2])
