"""A board whose /sys is a FUSE file system with a devfreq that behaves as the kernel's.

`mount(board, root)` makes ROOT/proc, ROOT/etc and an ordinary writable ROOT/run, and
serves ROOT/sys from a process of its own, so that any program may read and write it:

    with mount(ORIN_NANO_JP6, tmp_path) as fs:
        fs.path("min_freq").write_text("1020000000")   # as nvpmodel or a person would
        fs.vanish(); fs.appear()
        fs.fail("min_freq", errno.EIO)
        fs.set("/sys/class/thermal/cooling_device5/cur_state", "1\\n")
        fs.writes()                                    # everything written to the GPU's node

Needs root (or user_allow_other) and /dev/fuse. The same semantics without a mount:
tests/support/kernel_devfreq.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetuner.board.sysroot import SysRoot
from tests.support.boards import BY_KEY, Board, Files, Link
from tests.support.kernel_devfreq import WRITABLE, KernelDevfreq, Write

REPOSITORY = Path(__file__).resolve().parents[2]
_LIVE = ("min_freq", "max_freq", "cur_freq", "available_frequencies", "governor")


class BoardTree:
    """The files below a board's /sys; the devfreq attributes of each node are live."""

    def __init__(self, board: Board) -> None:
        self.gpu = board.gpu_node
        self.devices = {node.name: KernelDevfreq(node.frequencies) for node in board.nodes}
        self.files: Files = {n: c for n, c in board.files().items() if n.startswith("/sys/")}
        self._live = {
            f"{node.directory}/{attribute}": (node.name, attribute)
            for node in board.nodes
            for attribute in _LIVE
        }
        self._away: Files = {}

    @property
    def kernel(self) -> KernelDevfreq:
        """The GPU's device."""
        return self.devices[self.gpu.name]

    def vanish(self) -> None:
        """The driver unbinds: the GPU's devfreq node is gone, with its state."""
        link = f"/sys/class/devfreq/{self.gpu.name}"
        gone = [n for n in self.files if n == link or n.startswith(self.gpu.directory + "/")]
        self._away = {name: self.files.pop(name) for name in gone} or self._away

    def appear(self) -> None:
        self.files |= self._away
        old = self.kernel
        self.devices[self.gpu.name] = KernelDevfreq(self.gpu.frequencies)
        self.kernel.writes, self.kernel.faults = old.writes, old.faults

    def resolve(self, name: str) -> str:
        """`name` with the links in it followed. OSError ENOENT, ELOOP."""
        for _ in range(20):
            parts = name.strip("/").split("/")
            for index in range(1, len(parts) + 1):
                prefix = "/" + "/".join(parts[:index])
                entry = self.files.get(prefix)
                if isinstance(entry, Link):
                    target = posixpath.join(posixpath.dirname(prefix), entry.target)
                    rest = "/".join(parts[index:])
                    name = posixpath.normpath(posixpath.join(target, rest))
                    break
            else:
                return name
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def read(self, name: str) -> bytes:
        """A file's content, links in its path followed."""
        name = self.resolve(name)
        entry = self.files.get(name)
        if isinstance(entry, str):
            live = self._live.get(name)
            return (self.devices[live[0]].read(live[1]) if live else entry).encode()
        error = errno.EISDIR if self.names(name) else errno.ENOENT
        raise OSError(error, os.strerror(error))

    def write(self, name: str, data: bytes) -> None:
        name = self.resolve(name)
        live = self._live.get(name)
        if not isinstance(self.files.get(name), str):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if live:
            self.devices[live[0]].write(live[1], data.decode("utf-8", "replace"))
        else:
            self.files[name] = data.decode()

    def names(self, name: str) -> list[str]:
        """A directory's entries; empty: no such directory."""
        prefix = name.rstrip("/") + "/"
        found = {n[len(prefix) :].split("/", 1)[0] for n in self.files if n.startswith(prefix)}
        return sorted(found)

    def mode(self, name: str) -> int:
        """st_mode, links not followed."""
        entry = self.files.get(name)
        if isinstance(entry, Link):
            return stat.S_IFLNK | 0o777
        if isinstance(entry, str):
            live = self._live.get(name)
            return stat.S_IFREG | (0o644 if live and live[1] in WRITABLE else 0o444)
        if self.names(name) or name in ("/sys", "/sys/class/devfreq"):
            return stat.S_IFDIR | 0o755
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


class TreeRoot(SysRoot):
    """A board root in this process: /sys from a BoardTree, the rest from a directory."""

    def __init__(self, tree: BoardTree, directory: Path) -> None:
        super().__init__(directory)
        self.tree = tree

    def _name(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root))

    def _load(self, path: Path) -> bytes:
        name = self._name(path)
        return self.tree.read(name) if name.startswith("/sys/") else super()._load(path)

    def _store(self, path: Path, data: bytes) -> None:
        name = self._name(path)
        if name.startswith("/sys/"):
            self.tree.write(name, data)
        else:
            super()._store(path, data)

    def _list(self, path: Path) -> list[str]:
        name = self._name(path)
        if not name.startswith("/sys"):
            return super()._list(path)
        return self.tree.names(self.tree.resolve(name))

    def exists(self, name: str | os.PathLike[str]) -> bool:
        full = "/" + str(name).lstrip("/")
        if not full.startswith("/sys"):
            return super().exists(name)
        try:
            self.tree.mode(self.tree.resolve(full))
        except OSError:
            return False
        return True


class Mounted:
    """The parent's handle on a served board; each call is done when it returns."""

    def __init__(self, board: Board, root: Path) -> None:
        self.board = board
        self.root = root
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.devfreqfs", board.key, str(root / "sys")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    @property
    def pid(self) -> int:
        return self._server.pid

    def path(self, attribute: str) -> Path:
        """The path of an attribute of the GPU's node, through the class directory."""
        return self.root / "sys/class/devfreq" / self.board.gpu / attribute

    def vanish(self) -> None:
        self._ask("vanish")

    def appear(self) -> None:
        self._ask("appear")

    def fail(self, attribute: str, error: int | None) -> None:
        """Each write to the GPU's `attribute` fails with this errno; None: no longer."""
        self._ask("fail", attribute, error)

    def wish(self, hz: int) -> None:
        """What the governor would choose; cur_freq follows within min and max."""
        self._ask("wish", hz)

    def set(self, name: str, content: str) -> None:
        """The content of another file of the board, such as a cur_state."""
        self._ask("set", name, content)

    def writes(self) -> list[Write]:
        return [Write(*entry) for entry in self._ask("writes")]

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            # A mount namespace that was made meanwhile, a service's or a container's, holds
            # a copy of the mount: it must not outlive us.
            self._server.kill()
            self._server.wait()
        # Only if it ended without doing so itself.
        subprocess.run(["umount", "-l", str(self.root / "sys")], stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it is mounted."""
        for _ in range(500):
            if self._server.poll() is not None:
                raise RuntimeError(f"devfreqfs ended with {self._server.returncode}")
            if os.path.ismount(self.root / "sys"):
                return
            time.sleep(0.02)
        raise RuntimeError("devfreqfs did not mount within 10 s")

    def _ask(self, *request: Any) -> Any:
        assert self._server.stdin and self._server.stdout
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


@contextlib.contextmanager
def mount(board: Board, root: Path) -> Iterator[Mounted]:
    board.write(root, sys=False)
    mounted = Mounted(board, root)
    try:
        mounted.wait()
        yield mounted
    finally:
        mounted.close()


def _serve(board: Board, mountpoint: str) -> None:
    import mfusepy

    tree = BoardTree(board)
    lock = threading.Lock()

    class Operations(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            with lock:
                mode = tree.mode("/sys" + path.rstrip("/"))
            return {"st_mode": mode, "st_nlink": 1, "st_size": 4096}

        def readdir(self, path: str, fh: int) -> list[str]:
            with lock:
                return [".", "..", *tree.names("/sys" + path.rstrip("/"))]

        def readlink(self, path: str) -> str:
            with lock:
                entry = tree.files.get("/sys" + path)
            if not isinstance(entry, Link):
                raise mfusepy.FuseOSError(errno.EINVAL)
            return entry.target

        def open(self, path: str, flags: int) -> int:
            with lock:
                mode = tree.mode("/sys" + path)
            # Root passes every permission check, yet sysfs has no way to write these.
            if flags & (os.O_WRONLY | os.O_RDWR) and not mode & 0o200:
                raise mfusepy.FuseOSError(errno.EACCES)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            with lock:
                return tree.read("/sys" + path)[offset : offset + size]

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            with lock:
                tree.write("/sys" + path, data)
            return len(data)

    def command(operation: str, *arguments: Any) -> Any:
        match operation:
            case "vanish":
                tree.vanish()
            case "appear":
                tree.appear()
            case "fail":
                attribute, error = arguments
                tree.kernel.faults.pop(attribute, None)
                if error is not None:
                    tree.kernel.faults[attribute] = error
            case "wish":
                tree.kernel.wish_hz = arguments[0]
            case "set":
                name = tree.resolve(arguments[0])
                if name not in tree.files:
                    raise KeyError(name)
                tree.files[name] = arguments[1]
            case "writes":
                return [(w.attribute, w.text, w.error) for w in tree.kernel.writes]
        return None

    def control() -> None:
        for line in sys.stdin:
            try:
                with lock:
                    answer = {"result": command(*json.loads(line))}
            except (KeyError, ValueError, OSError) as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)
        subprocess.run(["umount", "-l", mountpoint])

    threading.Thread(target=control, daemon=True).start()
    mfusepy.FUSE(
        Operations(), mountpoint, foreground=True, nothreads=True, allow_other=True,
        direct_io=True, attr_timeout=0, entry_timeout=0, negative_timeout=0, fsname="devfreqfs",
    )  # fmt: skip


if __name__ == "__main__":
    _serve(BY_KEY[sys.argv[1]], sys.argv[2])
