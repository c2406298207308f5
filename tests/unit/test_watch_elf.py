"""The quick look at a file: by symbol name, and safe whatever the file holds."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetuner.watch import elf
from moetuner.watch.layout import FUNCTIONS

MACHINE = platform.machine()


def look(path: Path, machine: str = MACHINE) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return elf.may_export(fd, machine)
    finally:
        os.close(fd)


def compiled(directory: Path, text: str, *flags: str) -> Path:
    source, out = directory / "l.c", directory / "l.so"
    source.write_text(text)
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(out), *flags]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("library")
    return compiled(directory, "int llama_decode(void) { return 1; }").read_bytes()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("flags", [(), ("-s",)], ids=["whole", "stripped"])
def test_exports(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    assert look(compiled(tmp_path, f"int {name}(void) {{ return 1; }}", *flags))


def test_a_local_symbol_is_enough(tmp_path: Path) -> None:
    text = "static __attribute__((used)) int llama_encode(void) { return 1; }"
    assert look(compiled(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "int llama_decode_2(void) { return 1; }",
        "int llama(void) { return 1; }",
        'const char text[] = "llama_decode";',
        "int LLAMA_DECODE(void) { return 1; }",
    ],
)
def test_others(tmp_path: Path, text: str) -> None:
    assert not look(compiled(tmp_path, text))


@pytest.mark.parametrize("machine", ["aarch64" if MACHINE == "x86_64" else "x86_64", "riscv64", ""])
def test_another_machine(tmp_path: Path, library: bytes, machine: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(library)
    assert not look(path, machine)


def test_32_bit_and_big_endian(tmp_path: Path, library: bytes) -> None:
    for at, value in ((4, 1), (5, 2), (0, 0)):
        data = bytearray(library)
        data[at] = value
        path = tmp_path / "x"
        path.write_bytes(bytes(data))
        assert not look(path)


@pytest.mark.parametrize("name", ["", "x", "#!/bin/sh\n", "\x7fELF", "\x7fELF\x02\x01" + "\0" * 58])
def test_no_elf(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x"
    path.write_text(name)
    assert not look(path)


def test_no_regular_file() -> None:
    ours, theirs = os.pipe()
    try:
        assert not elf.may_export(ours, MACHINE)
    finally:
        os.close(ours)
        os.close(theirs)
    for path in ("/", "/dev/null"):
        assert not look(Path(path))


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.99])
def test_cut_short(tmp_path: Path, library: bytes, cut: float) -> None:
    path = tmp_path / "x"
    path.write_bytes(library[: int(len(library) * cut)])
    look(path)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_mutations_never_raise(tmp_path: Path, library: bytes, data: st.DataObject) -> None:
    mutated = bytearray(library)
    (table,) = struct.unpack_from("<Q", mutated, 40)
    # What it reads: the header and the section table.
    places = st.integers(0, 63) | st.integers(table, len(mutated) - 1)
    for _ in range(data.draw(st.integers(1, 10))):
        mutated[data.draw(places)] = data.draw(st.integers(0, 255))
    path = tmp_path / "x"
    path.write_bytes(bytes(mutated))
    assert look(path) in (True, False)


def test_a_name_across_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled(tmp_path, "int llama_synchronize(void) { return 1; }")
    for size in range(1, 64):
        monkeypatch.setattr(elf, "_BLOCK", size)
        assert look(path), size


def test_absurd_tables_are_not_read(
    tmp_path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 symbol tables, each with 200 MB of names in a sparse file."""
    count, size = 4000, 64
    names = 200 * 1024 * 1024
    header = bytearray(library[:64])
    struct.pack_into("<Q", header, 40, 64)
    struct.pack_into("<HH", header, 58, size, count)
    sections = bytearray()
    for index in range(count):
        kind = 3 if index % 2 else 2
        at = count * size + 64 + index
        link = (index + 1) % count
        sections += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, names, link, 0, 0, 0)
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(header + sections)
        file.truncate(names * 2)
    read = 0
    real = os.pread

    def counting(fd: int, length: int, offset: int) -> bytes:
        nonlocal read
        data = real(fd, length, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    assert not look(path)
    assert read <= elf.NAMES_LIMIT + 4096 * 64 + 64


def test_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """Another user's file: a mapping of it would end the daemon with SIGBUS."""
    names = "".join(f"int name_number_{i}(void) {{ return {i}; }}" for i in range(5_000))
    path = compiled(tmp_path, names)
    data = path.read_bytes()
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            with path.open("r+b") as file:
                file.truncate(0)
                file.write(data)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(50):
            assert not look(path)
    finally:
        stop.set()
        thread.join()
