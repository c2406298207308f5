"""Where to put probes in one ELF file. Runs as a process of its own.

    python3 -m moetuner.watch.inspector FD      → one JSON object on standard output

Files come from users, so they are taken apart outside the daemon: without privileges
if it can drop them, with limits on memory and time, and what it needs (pyelftools,
capstone) does not stay in memory. The daemon checks every number it gets back.

Entry. The kernel emulates some instructions (push, nop, branches) and single-steps the
others, which costs a second trap (5 µs in a virtual machine). So the entry probe sits
on the first emulated instruction of the straight-line beginning, as long as nothing
before it moves the stack pointer.

Return. A uretprobe replaces the return address, and a C++ exception that unwinds
through such a frame ends the process (std::terminate: the unwinder does not know the
trampoline). So returns are probed where they happen: at every return instruction that
the function can reach by jumps, following tail calls, also through the PLT. The stack
pointer tells whose return it is (probes/inference.h). When the code cannot be followed
with certainty the answer says why, and the daemon falls back to uretprobes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, cast

from moetuner.watch.image import Image, Symbol, Unclear
from moetuner.watch.places import MAX_SITES

try:  # before privileges are dropped: afterwards the module may not be readable
    import capstone
except ImportError:  # uretprobes work without it
    capstone = None

MEMORY_LIMIT = 1 << 30  # bytes of address space; a 20 MB symbol table takes 0.2 GiB
CPU_LIMIT_S = 20
WALL_LIMIT_S = 60  # a network file system may hang
MAX_REGIONS = 64
MAX_REGION_BYTES = 256 * 1024  # llama_context::decode has 12 KB
# arm64 instructions that the kernel simulates (arch/arm64/kernel/probes/decode-insn.c)
_SIMULATED = ("b", "bl", "cbz", "cbnz", "tbz", "tbnz", "adr", "nop")


class Tracer:
    """Finds entry and return sites by disassembly; `Unclear` when it is not certain."""

    def __init__(self, image: Image) -> None:
        if capstone is None:
            raise Unclear("capstone is not installed (apt-get install python3-capstone)")
        self.cs = capstone
        self.image = image
        if image.machine == "x86_64":
            self.disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        elif image.machine == "aarch64":
            self.disassembler = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        else:
            raise Unclear(f"machine {image.machine or 'unknown'}")
        self.disassembler.detail = True
        self._targets: set[int] = set()  # of all jumps that `returns` met
        self._tables: set[int] = set()  # regions with jumps whose targets it does not know

    def entry(self, function: Symbol) -> int:
        """Address for the entry probe (see the module's text), after `returns` of the function.

        Not behind the target of a jump: there a call would count once for each round of a loop.
        """
        if function.address in self._tables:
            return function.address
        for instruction in self.disassembler.disasm(
            self.image.code(function.address, 64), function.address
        ):
            if instruction.address >= function.address + max(function.size, 1):
                break
            if instruction.address > function.address and instruction.address in self._targets:
                break
            if self._emulated(instruction):
                return int(instruction.address)
            if self._is_branch(instruction) or self._moves_stack(instruction):
                break
        return function.address

    def returns(self, function: Symbol) -> set[int]:
        """Addresses of all return instructions the function's activation can end at."""
        sites: set[int] = set()
        pending = [function.address]
        done: set[int] = set()
        while pending:
            address = self._through_plt(pending.pop())
            region = self.image.region(address)
            if region is None:
                raise Unclear(f"{function.name} jumps to {address:#x}, which has no symbol")
            if region.address in done:
                continue
            done.add(region.address)
            if len(done) > MAX_REGIONS or region.size > MAX_REGION_BYTES:
                raise Unclear(f"{function.name} reaches too much code ({region.name})")
            pending.extend(self._sweep(region, sites))
        if not sites:
            raise Unclear(f"{function.name} has no return instruction")
        return sites

    def _sweep(self, region: Symbol, sites: set[int]) -> set[int]:
        """Adds the region's return instructions; gives the jump targets outside of it."""
        end = region.address + region.size
        starts: set[int] = set()
        inside: set[int] = set()
        outside: set[int] = set()
        at = region.address
        previous: list[Any] = []
        for instruction in self.disassembler.disasm(
            self.image.code(region.address, region.size), region.address
        ):
            starts.add(instruction.address)
            at = instruction.address + instruction.size
            if instruction.mnemonic in ("retaa", "retab"):
                # arch/arm64/kernel/probes/decode-insn.c; without a process that maps the
                # file the attempt succeeds and does nothing, so it must not be made.
                raise Unclear(f"{region.name} ends in {instruction.mnemonic}: cannot be probed")
            if instruction.group(self.cs.CS_GRP_RET):
                sites.add(instruction.address)
            elif self._is_branch(instruction):
                target = self._target(instruction)
                if target is None:
                    target = self._got_target(instruction)
                if target is not None:
                    (inside if region.address <= target < end else outside).add(target)
                elif self._is_table_jump(previous, instruction):
                    self._tables.add(region.address)
                else:
                    raise Unclear(
                        f"{region.name} jumps through {instruction.op_str} "
                        f"at {instruction.address:#x}"
                    )
            previous = [*previous[-5:], instruction]
        # Data between instructions would shift the rest: then ends or targets do not fit.
        if at != end or not inside <= starts:
            raise Unclear(f"{region.name} does not disassemble evenly")
        self._targets |= inside | outside
        return outside

    def _through_plt(self, address: int) -> int:
        """The function behind a PLT stub; `address` itself if it is none."""
        if self.image.region(address) is not None:
            return address
        base = None
        for instruction in self.disassembler.disasm(self.image.code(address, 24), address):
            name, operands = instruction.mnemonic, instruction.operands
            slot = self._slot(instruction)
            if name == "adrp":
                base = operands[1].imm
            elif name == "ldr" and base is not None:
                slot = base + operands[1].mem.disp
            if slot is not None:
                return self._behind(slot, address)
            if self._is_branch(instruction):
                break
        return address

    def _slot(self, instruction: Any) -> int | None:
        """The address that an x86 `jmp [rip + …]` takes its target from."""
        operands = instruction.operands
        if self.image.machine != "x86_64" or not instruction.mnemonic.endswith("jmp"):
            return None
        if len(operands) != 1 or operands[0].type != self.cs.x86.X86_OP_MEM:
            return None
        memory = operands[0].mem
        if instruction.reg_name(memory.base) != "rip" or memory.index:
            return None
        return int(instruction.address + instruction.size + memory.disp)

    def _behind(self, slot: int, address: int) -> int:
        if slot not in self.image.got:
            raise Unclear(f"the jump at {address:#x} leaves the file")
        return self.image.got[slot]

    def _got_target(self, instruction: Any) -> int | None:
        """Where a jump through the GOT goes that needs no PLT (-fno-plt)."""
        slot = self._slot(instruction)
        return None if slot is None else self._behind(slot, instruction.address)

    def _is_branch(self, instruction: Any) -> bool:
        if instruction.mnemonic.startswith(("call", "bl")) and not (
            instruction.mnemonic.startswith("bl") and instruction.mnemonic[2:3] in ("e", "o", "s")
        ):
            return False
        return bool(instruction.group(self.cs.CS_GRP_JUMP))

    def _target(self, instruction: Any) -> int | None:
        last = instruction.operands[-1] if instruction.operands else None
        immediate = (
            self.cs.x86.X86_OP_IMM if self.image.machine == "x86_64" else self.cs.arm64.ARM64_OP_IMM
        )
        return cast(int, last.imm) if last is not None and last.type == immediate else None

    def _is_table_jump(self, previous: list[Any], instruction: Any) -> bool:
        """A switch's jump through a register that was just computed from a table."""
        if not instruction.operands or len(instruction.operands) != 1:
            return False
        register = instruction.op_str.strip()
        for earlier in reversed(previous):
            if earlier.mnemonic == "add" and earlier.op_str.split(",")[0].strip() == register:
                return True
        return False

    def _emulated(self, instruction: Any) -> bool:
        """Instructions that uprobes need not single-step (arch/*/kernel/…/uprobes.c)."""
        name = instruction.mnemonic
        if self.image.machine == "x86_64":
            if instruction.size == 1 and 0x50 <= instruction.bytes[0] <= 0x57:
                return True  # push
            if name in ("call", "jmp") or name.startswith("j"):
                return self._target(instruction) is not None
            return bool(name == "nop" and instruction.opcode[0] == 0x90)  # not the long forms
        return name.startswith("b.") or name in _SIMULATED

    def _moves_stack(self, instruction: Any) -> bool:
        _, written = instruction.regs_access()
        return any(instruction.reg_name(r) in ("rsp", "esp", "sp", "wsp") for r in written)


def examine(file: BinaryIO) -> dict[str, Any]:
    """The file's probe places as file offsets:

    {"machine": …, "functions": {name: offset}, "entries": {name: offset},
     "sites": [offset…], "unclear": reason or null}
    """
    image = Image.read(file)
    answer: dict[str, Any] = {
        "machine": image.machine,
        "functions": {n: image.offset(s.address) for n, s in image.functions.items()},
        "entries": {},
        "sites": [],
        "unclear": None,
    }
    try:
        tracer = Tracer(image)
        sites: set[int] = set()
        for name, symbol in image.functions.items():
            sites |= tracer.returns(symbol)
            answer["entries"][name] = image.offset(tracer.entry(symbol))
        if len(sites) > MAX_SITES:
            raise Unclear(f"the functions have {len(sites)} return instructions")
        answer["sites"] = sorted(image.offset(site) for site in sites)
    except Unclear as error:
        answer["unclear"] = str(error)
    return answer


def restrict() -> None:
    """Gives up what is not needed to read one open file."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    signal.alarm(WALL_LIMIT_S)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)


def main(arguments: list[str]) -> int:
    with os.fdopen(int(arguments[0]), "rb") as file:
        restrict()
        try:
            answer = examine(file)
        except Exception as error:  # any malformed file: the daemon is told, in one line
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
