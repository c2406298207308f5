"""What /proc says, on a tree of files: names may hold anything, and processes end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetuner.watch.processes import ExecutableMapping, ProcFs

PID = 2213
STAT = (
    "{pid} ({comm}) {state} 1 2213 2213 0 -1 4194304 100 0 0 0 "
    "{user} {system} 0 0 20 0 9 0 {started}"
)
MAPS = b"""\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 1234            /usr/bin/llama server
55d0c0001000-55d0c0002000 r-xp 00001000 fe:00 1234            /usr/bin/llama server
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
7f0000001000-7f0000002000 r-xp 00000000 103:02 99             /x/li\\012b\xff.so (deleted)
7f0000002000-7f0000003000 --xs 00002000 00:2f 18446744073709551615  /memfd:x
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0               [vdso]
"""


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = ProcFs(root)

    def put(self, name: str, data: bytes | str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def process(self, pid: int = PID, comm: str = "llama-server", state: str = "S") -> None:
        stat = STAT.format(pid=pid, comm=comm, state=state, user=30, system=12, started=987)
        self.put(f"{pid}/stat", stat)
        self.put(f"{pid}/comm", comm + "\n")
        self.put(f"{pid}/cmdline", b"llama-server\0-m\0\xff.gguf\0\0")
        self.put(f"{pid}/environ", b"A=1\0B=x=y\0NOTHING\0=odd\0")
        os.symlink("/usr/bin/llama-server", self.root / str(pid) / "exe")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_process(tree: Tree) -> None:
    tree.process()
    process = tree.proc.process(PID)
    assert process is not None
    assert (process.pid, process.started) == (PID, 987)
    assert process.argv == ("llama-server", "-m", "\udcff.gguf", "")
    assert process.exe == "/usr/bin/llama-server"
    assert process.environ["B"] == "x=y"
    assert process.environ["NOTHING"] == ""


@pytest.mark.parametrize("comm", ["a b", ") S 1 2 3", "((", "x) (y", "\n)", ""])
def test_names_do_not_shift_fields(tree: Tree, comm: str) -> None:
    tree.process(comm=comm)
    assert tree.proc.started(PID) == 987
    assert tree.proc.cpu_ticks(PID) == 42


def test_one_that_is_gone(tree: Tree) -> None:
    proc = tree.proc
    assert proc.process(PID) is None
    assert proc.started(PID) is None
    assert proc.cpu_ticks(PID) is None
    assert proc.stack_pointer(PID, PID) is None
    assert not proc.thread_alive(PID, PID)
    assert not proc.waits_for_disk(PID)
    assert proc.threads(PID) == []
    assert list(proc.executable_mappings(PID)) == []
    assert (proc.comm(PID), proc.exe(PID)) == ("?", "")


@pytest.mark.parametrize("stat", ["", "1", "1 (x", "1 (x) S", "1 (x) S 1 2 3"])
def test_a_stat_file_that_is_cut_short(tree: Tree, stat: str) -> None:
    tree.put(f"{PID}/stat", stat)
    assert tree.proc.started(PID) is None
    assert tree.proc.cpu_ticks(PID) is None


def test_pids(tree: Tree) -> None:
    for name in ("1", "20", "3", "self", "sys", "4x"):
        (tree.root / name).mkdir()
    assert tree.proc.pids() == [1, 3, 20]


def test_executable_mappings(tree: Tree) -> None:
    tree.put(f"{PID}/maps", MAPS)
    assert list(tree.proc.executable_mappings(PID)) == [
        ExecutableMapping(
            PID, 0x55D0C0001000, 0x55D0C0002000, (0xFE, 0), 1234, "/usr/bin/llama server"
        ),
        ExecutableMapping(
            PID, 0x7F0000001000, 0x7F0000002000, (0x103, 2), 99, "/x/li\\012b\\xff.so (deleted)"
        ),
        ExecutableMapping(
            PID, 0x7F0000002000, 0x7F0000003000, (0, 0x2F), 18446744073709551615, "/memfd:x"
        ),
    ]
    expected = tree.root / str(PID) / "map_files" / "7f0000001000-7f0000002000"
    assert tree.proc.mapped_file(PID, 0x7F0000001000, 0x7F0000002000) == expected


@pytest.mark.parametrize(
    ("state", "alive", "disk"),
    [
        ("R", True, False),
        ("S", True, False),
        ("D", True, True),
        ("t", True, False),
        ("Z", False, False),
        ("X", False, False),
    ],
)
def test_thread_states(tree: Tree, state: str, alive: bool, disk: bool) -> None:
    tree.put(
        f"{PID}/task/7/stat",
        STAT.format(pid=7, comm="x", state=state, user=0, system=0, started=1),
    )
    assert tree.proc.thread_alive(PID, 7) is alive
    assert tree.proc.waits_for_disk(PID) is disk


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("running\n", None),
        ("202 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffd00001000 0x7f00\n", 0x7FFD00001000),
        ("-1 0x7ffd00001000 0x7f00\n", 0x7FFD00001000),
        ("", None),
        ("x y z\n", None),
    ],
)
def test_stack_pointer(tree: Tree, text: str, pointer: int | None) -> None:
    tree.put(f"{PID}/task/7/syscall", text)
    assert tree.proc.stack_pointer(PID, 7) == pointer


def test_of_this_very_process() -> None:
    proc = ProcFs()
    process = proc.process(os.getpid())
    assert process is not None
    assert process.exe == os.path.realpath("/proc/self/exe")
    assert os.getpid() in proc.pids()
    assert proc.thread_alive(os.getpid(), os.getpid())
    assert any(m.path == process.exe for m in proc.executable_mappings(os.getpid()))
