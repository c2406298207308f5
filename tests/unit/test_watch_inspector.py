"""The inspector on arm64 code that was compiled elsewhere, and on files that lie."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import capstone
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetuner.watch import layout
from moetuner.watch.places import Places
from tests.support.listing import Listing, examine

# Libraries with their listings; the script `build` beside them makes both.
ARM64 = Path(__file__).parent.parent / "bpf" / "native" / "aarch64"
CLEAR = ["plain", "plain-O0", "shapes", "shapes-O0", "shapes-Os", "shapes-protected"]
CLEAR += ["shapes-frames", "loop"]


def listing(name: str) -> Listing:
    return Listing((ARM64 / f"{name}.txt").read_text())


@pytest.mark.parametrize("name", CLEAR)
def test_arm64_sites_are_the_returns(name: str) -> None:
    places = examine(ARM64 / f"{name}.so")
    assert places.unclear is None
    assert set(places.sites) == listing(name).returns()


@pytest.mark.parametrize("name", CLEAR)
def test_arm64_entries(name: str) -> None:
    """In the straight line at the beginning, the stack pointer as on entry."""
    places, code = examine(ARM64 / f"{name}.so"), listing(name)
    for function, entry in places.entries.items():
        before = [words for at, words in code.functions[function] if at < entry]
        assert entry in [at for at, _ in code.functions[function]]
        moving = [w for w in before if "sp" in w.split() or "[sp" in w or w.startswith("b")]
        assert [w for w in moving if w not in ("paciasp", "bti c")] == [], function


def test_arm64_authenticated_returns_are_left_to_uretprobes() -> None:
    """The kernel cannot probe retaa (and old versions of capstone do not know it)."""
    places = examine(ARM64 / "shapes-retaa.so")
    assert set(places.functions) == set(layout.FUNCTIONS)
    assert places.unclear is not None
    known = int(capstone.__version__.split(".")[0]) >= 5
    assert ("retaa" in places.unclear) == known


# -- files that lie ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small library of this machine."""
    directory = tmp_path_factory.mktemp("library")
    source, out = directory / "l.c", directory / "l.so"
    source.write_text("long llama_decode(long x) { return x + 1; }")
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(out)], check=True
    )
    return out.read_bytes()


def answer(path: Path, data: bytes) -> Places | str:
    """What the daemon makes of the inspector's answer: places, or an error in one line."""
    path.write_bytes(data)
    try:
        return examine(path)
    except (ValueError, TypeError, KeyError) as error:
        return str(error)


def test_it_finds_the_function(tmp_path: Path, library: bytes) -> None:
    found = answer(tmp_path / "x", library)
    assert isinstance(found, Places)
    assert set(found.functions) == {"llama_decode"}
    assert found.unclear is None


ELF64 = {
    "e_phoff": (32, "<Q"),
    "e_shoff": (40, "<Q"),
    "e_phnum": (56, "<H"),
    "e_shentsize": (58, "<H"),
    "e_shnum": (60, "<H"),
    "e_shstrndx": (62, "<H"),
}


@pytest.mark.parametrize("value", [0, 0xFFFF, 2**64 - 1])
@pytest.mark.parametrize("field", ELF64)
def test_absurd_headers(tmp_path: Path, library: bytes, field: str, value: int) -> None:
    at, form = ELF64[field]
    data = bytearray(library)
    struct.pack_into(form, data, at, value & (2 ** (8 * struct.calcsize(form)) - 1))
    assert answer(tmp_path / "x", bytes(data))


SECTION = {"sh_offset": 24, "sh_size": 32, "sh_link": 40, "sh_entsize": 56}


@pytest.mark.parametrize("value", [0, 24, 2**40, 2**64 - 1])
@pytest.mark.parametrize("field", SECTION)
def test_absurd_sections(tmp_path: Path, library: bytes, field: str, value: int) -> None:
    data = bytearray(library)
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    form = "<I" if field == "sh_link" else "<Q"
    for index in range(count):
        struct.pack_into(
            form,
            data,
            table + index * size + SECTION[field],
            value & (2 ** (8 * struct.calcsize(form)) - 1),
        )
    assert answer(tmp_path / "x", bytes(data))


@pytest.mark.parametrize("value", [0, 1, 2**40, 2**64 - 1])
@pytest.mark.parametrize("field", ["st_value", "st_size"])
def test_absurd_symbols(tmp_path: Path, library: bytes, field: str, value: int) -> None:
    """Each symbol table entry of a function lies."""
    data = bytearray(library)
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    for index in range(count):
        header = table + index * size
        (kind,) = struct.unpack_from("<I", data, header + 4)
        if kind in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            offset, length = struct.unpack_from("<QQ", data, header + 24)
            for symbol in range(offset, offset + length, 24):
                at = symbol + (8 if field == "st_value" else 16)
                struct.pack_into("<Q", data, at, value)
    found = answer(tmp_path / "x", bytes(data))
    if isinstance(found, Places):
        assert all(0 < offset < len(data) for offset in found.functions.values())


def test_a_huge_compressed_section(tmp_path: Path) -> None:
    """Expands to far more than the inspector may use: an error, and the machine lives."""
    assembly, source = tmp_path / "a.s", tmp_path / "a.so"
    assembly.write_text(
        ".globl llama_decode\n.type llama_decode,@function\nllama_decode:\nret\n"
        ".size llama_decode,1\n"
    )
    subprocess.run(["gcc", "-shared", "-nostdlib", str(assembly), "-o", str(source)], check=True)
    data = bytearray(source.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    for index in range(count):
        header = table + index * size
        (kind,) = struct.unpack_from("<I", data, header + 4)
        if kind in (2, 3, 11):
            struct.pack_into("<Q", data, header + 8, 0x800)  # SHF_COMPRESSED
    assert isinstance(answer(tmp_path / "x", bytes(data)), str)


@pytest.mark.parametrize("machine", [3, 40, 183, 243, 0])
def test_another_machine(tmp_path: Path, library: bytes, machine: int) -> None:
    data = bytearray(library)
    struct.pack_into("<H", data, 18, machine)
    found = answer(tmp_path / "x", bytes(data))
    assert isinstance(found, str) or found.unclear is not None


def test_32_bit(tmp_path: Path, library: bytes) -> None:
    data = bytearray(library)
    data[4] = 1
    found = answer(tmp_path / "x", bytes(data))
    assert isinstance(found, str) or not found.functions


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_mutations(tmp_path: Path, library: bytes, data: st.DataObject) -> None:
    mutated = bytearray(library)
    for _ in range(data.draw(st.integers(1, 20))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(mutated)))
    found = answer(tmp_path / "x", bytes(mutated[:cut] if cut % 2 else mutated))
    if isinstance(found, str):
        assert "\n" not in found
    else:
        assert set(found.functions) <= set(layout.FUNCTIONS)
        assert found.unclear is not None or found.sites or not found.functions


def test_nothing_is_left_of_root(tmp_path: Path) -> None:
    """What reads the file may not be root: the kernel says so of a stopped inspector."""
    code = (
        "from moetuner.watch import inspector; inspector.restrict();"
        "import os; print(os.getresuid(), os.getresgid(), os.getgroups());"
        "print(open('/proc/self/status').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    if os.geteuid() == 0:
        assert done.startswith("(65534, 65534, 65534) (65534, 65534, 65534) []")
    assert "CapEff:\t0000000000000000" in done
