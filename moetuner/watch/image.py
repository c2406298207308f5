"""An ELF file as the inspector sees it: code, function symbols, PLT targets.

Part of the inspector's process (inspector.py): what it reads may be anything.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

from moetuner.watch.layout import FUNCTIONS

_SYMBOL = struct.Struct("<IBBHQQ")
_STT_FUNC, _STT_GNU_IFUNC = 2, 10


class Unclear(Exception):
    """The code cannot be followed with certainty; the text says where and why."""


@dataclass(frozen=True)
class Symbol:
    name: str
    address: int
    size: int


@dataclass
class Image:
    """An ELF file's code, functions and PLT targets, by virtual address."""

    machine: str
    segments: list[tuple[int, int, bytes, int]]  # address, file size, data, file offset
    functions: dict[str, Symbol]  # the probed ones that the file defines
    sized: list[Symbol] = field(default_factory=list)  # sorted by address
    got: dict[int, int] = field(default_factory=dict)  # GOT slot → address of the function

    @classmethod
    def read(cls, file: BinaryIO) -> Image:
        elf = ELFFile(file)
        machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(elf["e_machine"], "")
        segments = [
            (s["p_vaddr"], s["p_filesz"], s.data(), s["p_offset"])
            for s in elf.iter_segments()
            if s["p_type"] == "PT_LOAD" and s["p_flags"] & 1
        ]
        image = cls(machine, segments, {})
        sized: dict[int, Symbol] = {}
        for name in (".dynsym", ".symtab"):
            section = elf.get_section_by_name(name)
            if section is None or section["sh_entsize"] != _SYMBOL.size:
                continue
            strings = elf.get_section(section["sh_link"]).data()
            for symbol in _functions(section.data(), strings):
                if symbol.name in FUNCTIONS:
                    image.functions.setdefault(symbol.name, symbol)
                if symbol.size > getattr(sized.get(symbol.address), "size", 0):
                    sized[symbol.address] = symbol
        image.sized = sorted(sized.values(), key=lambda s: s.address)
        image.got = dict(_got(elf))
        return image

    def offset(self, address: int) -> int:
        for start, length, _, offset in self.segments:
            if start <= address < start + length:
                return address - start + offset
        raise Unclear(f"{address:#x} is in no executable segment")

    def code(self, address: int, length: int) -> bytes:
        for start, size, data, _ in self.segments:
            if start <= address < start + size:
                return data[address - start : min(address - start + length, size)]
        raise Unclear(f"{address:#x} is in no executable segment")

    def region(self, address: int) -> Symbol | None:
        """The sized function that holds `address`."""
        at = bisect.bisect_right(self.sized, address, key=lambda s: s.address) - 1
        if (
            at >= 0
            and self.sized[at].address <= address < self.sized[at].address + self.sized[at].size
        ):
            return self.sized[at]
        return None


def _functions(table: bytes, strings: bytes) -> Iterator[Symbol]:
    usable = len(table) - len(table) % _SYMBOL.size
    for name_at, info, _, section, address, size in _SYMBOL.iter_unpack(table[:usable]):
        if section and address and info & 0xF in (_STT_FUNC, _STT_GNU_IFUNC):
            end = strings.find(b"\0", name_at)
            yield Symbol(strings[name_at:end].decode("utf-8", "replace"), address, size)


def _got(elf: Any) -> Iterator[tuple[int, int]]:
    for section in elf.iter_sections():
        if not isinstance(section, RelocationSection) or not section["sh_link"]:
            continue
        symbols = elf.get_section(section["sh_link"])
        if section.name not in (".rela.plt", ".rela.dyn") or symbols is None:
            continue
        jump_slot = {"EM_X86_64": (6, 7), "EM_AARCH64": (1025, 1026)}.get(elf["e_machine"], ())
        for relocation in section.iter_relocations():
            if relocation["r_info_type"] in jump_slot:
                value = symbols.get_symbol(relocation["r_info_sym"])["st_value"]
                if value:
                    yield relocation["r_offset"], value
