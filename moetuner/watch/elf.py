"""Does a file export llama.cpp's inference functions? A quick look, by symbol name.

The daemon asks this of each executable file that gets mapped, so it reads section
headers and name tables only, never the code or data (a CUDA library has 500 MB of
those). What passes is examined by `inspector`, in a process of its own.
"""

from __future__ import annotations

import os
import re
import struct

from moetuner.watch.layout import FUNCTIONS

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SHT_SYMTAB, _SHT_STRTAB, _SHT_DYNSYM = 2, 3, 11
_MACHINES = {"x86_64": 62, "aarch64": 183}
_MAX_SECTIONS = 4096
NAMES_LIMIT = 256 * 1024 * 1024  # bytes of name tables in a file; the largest seen is 20 MB
_BLOCK = 1024 * 1024
_PATTERN = re.compile(b"|".join(name.encode() + b"\0" for name in FUNCTIONS))
_OVERLAP = max(map(len, FUNCTIONS))  # bytes of a name (with its NUL) before a block's end


def may_export(fd: int, machine: str) -> bool:
    """True if a symbol table of the 64-bit ELF file names one of the functions.

    A name that only ends like one (`my_llama_decode`) passes too: linkers share tails
    of names. Never raises for what a file holds; anything that is no ELF file of
    `machine` (x86_64, aarch64) is False.
    """
    try:
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[:6] != b"\x7fELF\x02\x01":
            return False
        _, _, kind, _, _, _, offset, _, _, _, _, entry_size, count, _ = _HEADER.unpack(header)
        if kind != _MACHINES.get(machine) or entry_size != _SECTION.size or count > _MAX_SECTIONS:
            return False
        table = os.pread(fd, count * entry_size, offset) if offset < size else b""
        sections = [
            _SECTION.unpack_from(table, at)
            for at in range(0, len(table) - _SECTION.size + 1, _SECTION.size)
        ]
        linked = {s[6] for s in sections if s[1] in (_SHT_SYMTAB, _SHT_DYNSYM)}
        names = [sections[i] for i in linked if i < len(sections)]
        tables = {(s[4], s[5]) for s in names if s[1] == _SHT_STRTAB}
        inside = [(at, length) for at, length in tables if at + length <= size]
        if sum(length for _, length in inside) > NAMES_LIMIT:
            return False
        return any(_names_one(fd, at, length) for at, length in inside)
    except (OSError, OverflowError):
        return False


def _names_one(fd: int, offset: int, length: int) -> bool:
    # Not mapped: a file that is cut short meanwhile would kill us (SIGBUS).
    before = b""
    end = offset + length
    while offset < end:
        block = os.pread(fd, min(_BLOCK, end - offset), offset)
        if not block:
            return False
        if _PATTERN.search(before + block):
            return True
        before, offset = (before + block)[-_OVERLAP:], offset + len(block)
    return False
