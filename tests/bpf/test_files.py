"""Files that hold llama.cpp: found when they are mapped, whatever they are called and
wherever they lie; watched at the right places as long as they are in use."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.bpf.conftest import Start
from tests.bpf.harness import Driver, Rig
from tests.bpf.natives import Natives, copy
from tests.support.listing import examine

# What is told here does not depend on how returns are probed.
pytestmark = [pytest.mark.root, pytest.mark.parametrize("rig", ["sites"], indirect=True)]

INSIDE = {
    "space": b"my llama.so",
    "newline": b"li\nb.so",
    "escapes": b"\x1b[31m\x1b]0;x\x07.so",
    "not UTF-8": b"\xff\xfe\xe9.so",
    "looks deleted": b"x.so (deleted)",
    "backslashes": b"\\012\\x41.so",
    "long": b"/".join([b"d" * 100] * 20) + b"/l.so",
    "other name": b"libxllamacpp.abi3.so",
}


def calls(rig: Rig, driver: Driver, number: int = 23) -> None:
    """The driver's calls are seen, each once."""
    before = rig.count(driver.pid)
    assert driver.ask(f"call decode {number}") == str(sum(10 * x for x in range(number)))
    assert rig.count(driver.pid) - before == number


@pytest.mark.parametrize("name", INSIDE.values(), ids=INSIDE)
def test_any_name(rig: Rig, natives: Natives, start: Start, tmp_path: Path, name: bytes) -> None:
    path = os.fsencode(tmp_path) + b"/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    copy(natives.small(), path)
    driver = start()
    if b"\n" in name:  # the driver's language has lines
        os.symlink(path, tmp_path / "link.so")
        driver.load(tmp_path / "link.so")
    else:
        driver.load(path)
    library = rig.attached(path)
    assert not library.foreign
    assert library.path.isprintable()
    calls(rig, driver)
    assert all(line.isprintable() for line in rig.lines)
    rig.watcher.libraries.retire({})  # nobody maps it: it stays where it can be seen
    assert rig.state(path) == "attached"


def test_other_files_are_none_of_ours(rig: Rig, start: Start, tmp_path: Path) -> None:
    before = len(rig.watcher.libraries.known)
    driver = start()
    for path in ("/usr/bin/python3", "/dev/zero", "/proc/self/maps", "/"):
        driver.ask(f"map 1 {path}")
    rig.settle()
    assert len(rig.watcher.libraries.known) == before


def test_a_name_alone_is_not_enough(
    rig: Rig, natives: Natives, start: Start, tmp_path: Path
) -> None:
    """A program that calls the functions names them too."""
    source = tmp_path / "user.c"
    source.write_text(
        "long llama_decode(void *, long); long f(void) { return llama_decode(0, 0); }"
    )
    path = natives.library(str(source))
    driver = start()
    driver.ask(f"map 1 {path}")
    rig.settle()
    assert rig.state(path) == "unknown"


def test_configured(rig: Rig, natives: Natives, start: Start, tmp_path: Path) -> None:
    copy(natives.small(), tmp_path / "one.so")
    config = type(rig.config)((f"{tmp_path}/*.so",), 300.0, "sites")
    try:
        rig.watcher.configure(config)
        rig.attached(tmp_path / "one.so")  # though nobody maps it
        driver = start()
        driver.load(tmp_path / "one.so")
        calls(rig, driver)
    finally:
        rig.watcher.configure(rig.config)


# -- programs of other kinds -------------------------------------------------------------

LINKED = {
    "pie": ((), False),
    "no-pie": (("-no-pie",), False),
    "static": (("-static",), False),
    "static-pie": (("-static-pie",), False),
    "exported and stripped": (("-rdynamic",), True),
}


@pytest.mark.parametrize(("flags", "strip"), LINKED.values(), ids=LINKED)
def test_the_executable_itself(
    rig: Rig,
    natives: Natives,
    start: Start,
    tmp_path: Path,
    flags: tuple[str, ...],
    strip: bool,
) -> None:
    path = tmp_path / "llama-server"
    copy(natives.program(*flags, strip=strip), path)
    driver = start(path)
    rig.attached(path)
    calls(rig, driver)


EXTENSION = """
import ctypes, sys
print("ready", flush=True)
for line in sys.stdin:
    library = ctypes.CDLL(line.strip())
    print(sum(library.llama_decode(None, ctypes.c_long(x)) for x in range(23)), flush=True)
"""


def test_python_extension(rig: Rig, start: Start, small: Path) -> None:
    """A process that runs for long before it loads the library."""
    driver = start(sys.executable, "-c", EXTENSION)
    rig.settle()
    assert driver.ask(str(small)) == "2530"
    rig.attached(small)
    assert driver.ask(str(small)) == "2530"
    assert rig.count(driver.pid) == 23


# -- identity ------------------------------------------------------------------------------


def test_hard_links_are_one_file(rig: Rig, start: Start, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    os.link(small, other)
    drivers = [start(), start()]
    for driver, path in zip(drivers, (small, other), strict=True):
        driver.load(path)
        rig.attached(path)
    rig.settle()
    assert rig.library(small) is rig.library(other)
    for driver in drivers:
        calls(rig, driver)


def test_deleted_while_mapped(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    old, new = start(), start()
    old.load(small)
    first = rig.attached(small)
    small.unlink()
    copy(natives.small("-DPADDED"), small)
    new.load(small)
    second = rig.attached(small)
    assert first.identity != second.identity
    calls(rig, old)
    calls(rig, new)
    rig.rescan()
    rig.settle()
    assert first.state == second.state == "attached"
    old.kill()
    rig.rescan()
    rig.settle()
    known = rig.watcher.libraries.known
    assert first.identity not in known
    assert second.identity in known
    calls(rig, new)


def test_seen_first_when_deleted_already(rig: Rig, start: Start, small: Path) -> None:
    driver = start()
    identity = (small.stat().st_dev, small.stat().st_ino)
    driver.load(small)
    small.unlink()
    rig.until(lambda: known_state(rig, identity) == "attached", "attached")
    calls(rig, driver)


def known_state(rig: Rig, identity: tuple[int, int]) -> str:
    library = rig.watcher.libraries.known.get(identity)
    return library.state if library else "unknown"


def test_replaced_by_rename(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    old, new = start(), start()
    old.load(small)
    first = rig.attached(small)
    built = small.with_name("new.so")
    copy(natives.small("-DPADDED"), built)
    built.rename(small)
    new.load(small)
    second = rig.attached(small)
    assert first.identity != second.identity
    calls(rig, old)
    calls(rig, new)


def test_rewritten_in_place(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    old = start()
    old.load(small)
    library = rig.attached(small)
    content = natives.small("-DPADDED").read_bytes()
    with small.open("r+b", buffering=0) as file:
        file.write(content[:1000])
        rig.until(lambda: library.state == "changing", "the first write is noticed")
        assert library.links == []
        rig.until(lambda: library.detaching == 0, "the probes are gone")
        file.write(content[1000:])
        rig.settle()
        assert library.state == "changing", "its writer is at work still"
    old.kill()
    new = start()
    new.load(small)
    assert rig.attached(small) is library
    calls(rig, new)


def test_cut_short_and_rewritten(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    """As cp does it. While the probed page is missing the kernel cannot remove its probe,
    and would run the old instruction at the new code's place."""
    old = start()
    old.load(small)
    library = rig.attached(small)
    before, after = examine(small), examine(natives.small("-DFLAT"))
    assert before.entries == after.entries, "the same place, but another instruction"
    content = natives.small("-DFLAT").read_bytes()
    with small.open("r+b", buffering=0) as file:
        file.truncate(0)
        rig.until(lambda: library.state == "changing", "noticed")
        file.write(content[:1000])
        rig.settle()
        assert library.links, "not yet"
        file.write(content[1000:])
        rig.until(lambda: not library.links and not library.detaching, "removed")
    new = start()
    new.load(small)
    assert rig.attached(small) is library
    calls(rig, new)


def test_cut_short_for_good(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    driver = start()
    driver.load(small)
    library = rig.attached(small)
    with small.open("r+b") as file:
        file.truncate(100)
    rig.until(lambda: library.state == "failed", "examined in vain")
    assert library.links, "somebody maps it"
    driver.kill()
    rig.rescan()
    rig.until(lambda: not library.links and not library.detaching, "removed")


def test_changed_without_a_close(rig: Rig, start: Start, small: Path) -> None:
    driver = start()
    driver.load(small)
    library = rig.attached(small)
    os.truncate(small, small.stat().st_size + 1)
    rig.until(lambda: library.state == "changing", "noticed")
    for _ in range(2):
        rig.rescan()
    rig.attached(small)
    calls(rig, driver)


def test_rewritten_through_a_mapping(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    library_before = natives.small()
    content = natives.small("-DPADDED").read_bytes()
    size = max(len(content), library_before.stat().st_size)
    os.truncate(small, size)
    first = start()
    first.load(small)
    library = rig.attached(small)
    first.kill()
    with small.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        view[: len(content)] = content
    rig.until(lambda: any(f"{small}: it was written" in line for line in rig.lines), "noticed")
    driver = start()
    driver.load(small)
    assert rig.attached(small) is library
    calls(rig, driver)


def test_rewritten_as_something_else(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    driver = start()
    driver.load(small)
    rig.attached(small)
    driver.kill()
    shutil.copyfile("/usr/bin/true", small)
    rig.until(lambda: rig.state(small) in ("unknown", "failed"), "no longer watched")


def test_probes_follow_the_code(rig: Rig, natives: Natives, start: Start, small: Path) -> None:
    """Written while it is being examined: what counts is what it holds in the end."""
    for _ in range(5):
        shutil.copyfile(natives.small("-DPADDED"), small)
        rig.watcher.libraries.offer(small, str(small))
        rig.turn()
        shutil.copyfile(natives.small(), small)
        rig.turn()
    driver = start()
    driver.load(small)
    rig.settle()
    rig.attached(small)
    calls(rig, driver)


# -- mount namespaces ------------------------------------------------------------------------


def in_namespace(start: Start, natives: Natives, script: str, *arguments: object) -> Driver:
    """A driver in a mount namespace of its own, after `script` has run there."""
    command = f"set -e; {script}; exec {natives.driver}"
    return start("unshare", "--mount", "sh", "-c", command, "sh", *map(str, arguments))


TMPFS = 'mount -t tmpfs tmpfs "$1"; cp "$2" "$1/libllama.so"'


def inside_of(driver: Driver, path: Path) -> Path:
    return Path(f"/proc/{driver.pid}/root{path}")


def test_another_mount_namespace(rig: Rig, natives: Natives, start: Start, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    keeper = in_namespace(start, natives, TMPFS, room, natives.small())
    path = room / "libllama.so"
    assert not path.exists(), "it is there in the other namespace only"
    seen = inside_of(keeper, path)
    for _ in range(2):  # the second time it was seen before
        driver = start("nsenter", "--mount", f"--target={keeper.pid}", str(natives.driver))
        driver.load(path)
        library = rig.attached(seen)
        assert library.foreign
        calls(rig, driver)
        driver.kill()
        rig.rescan()
        rig.until(lambda: rig.state(seen) == "unknown", "let go after its last process")


def test_the_same_path_is_another_file_here(
    rig: Rig, natives: Natives, start: Start, small: Path
) -> None:
    room = small.parent
    there = in_namespace(start, natives, TMPFS, room, natives.small("-DPADDED"))
    here = start()
    there.load(small)
    here.load(small)
    foreign, own = rig.attached(inside_of(there, small)), rig.attached(small)
    assert foreign.identity != own.identity
    assert (foreign.foreign, own.foreign) == (True, False)
    calls(rig, there)
    calls(rig, here)


OVERLAY = (
    'mount -t tmpfs tmpfs "$1"; mkdir "$1/upper" "$1/work" "$1/merged"; '
    'mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$1/merged"'
)


def test_overlayfs(rig: Rig, natives: Natives, start: Start, tmp_path: Path, small: Path) -> None:
    """As in a container. Two from one image share the file below: each call counts once."""
    room = tmp_path / "room"
    room.mkdir()
    image = tmp_path / "image"
    image.mkdir()
    copy(small, image / "libllama.so")
    containers = [in_namespace(start, natives, OVERLAY, room, image) for _ in range(2)]
    path = room / "merged" / "libllama.so"
    for container in containers:
        container.load(path)
        rig.attached(inside_of(container, path))
    rig.settle()
    for container in containers:
        calls(rig, container)
    containers[0].kill()
    rig.rescan()
    rig.settle()
    calls(rig, containers[1])


def test_a_log_line_names_each_file(rig: Rig, start: Start, small: Path) -> None:
    driver = start()
    driver.load(small)
    rig.attached(small)
    lines = [line for line in rig.lines if str(small) in line]
    assert [re.sub(r"^watching .*/", "", line) for line in lines] == ["libllama.so (llama_decode)"]
