"""Where functions begin and return: the inspector's opinion, and objdump's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from moetuner.watch import layout
from moetuner.watch.places import Places
from moetuner.watch.survey import inspect

_JUMP = re.compile(
    r"(?:bnd |notrack )?(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*<([^>+@]+)(?:@@?\w+)?(?:\+0x[0-9a-f]+)?>"
)
_RETURN = re.compile(r"(?:bnd |repz )?ret\b")


def examine(path: Path) -> Places:
    """The inspector's answer, checked as the daemon does."""
    with path.open("rb") as file:
        return Places.parse(json.loads(inspect(file.fileno())), path.stat().st_size)


class Listing:
    """`functions`: name → (address, instruction) of each. Addresses are those of the file's
    symbols; in the libraries that the tests build they equal file offsets."""

    def __init__(self, text: str) -> None:
        self.functions: dict[str, list[tuple[int, str]]] = {}
        for block in re.split(r"\n\n(?=[0-9a-f]{16} <)", text):
            head = re.match(r"\s*[0-9a-f]{16} <([^>]+)>:\n", block)
            if head:
                self.functions[head[1]] = [
                    (int(at, 16), " ".join(words.split()))
                    for at, words in re.findall(r"^ *([0-9a-f]+):\t(.*)$", block, re.MULTILINE)
                ]

    @classmethod
    def of(cls, path: Path) -> Listing:
        command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
        return cls(subprocess.check_output(command, text=True))

    def reached(self, name: str) -> set[str]:
        """The function, those that it jumps to (tail calls, cold parts), and theirs."""
        found: set[str] = set()
        pending = [name]
        while pending:
            current = pending.pop()
            if current in found or current not in self.functions:
                continue
            found.add(current)
            jumps = (_JUMP.match(words) for _, words in self.functions[current])
            pending.extend(jump[1] for jump in jumps if jump)
        return found

    def returns(self, *, everywhere: bool = False) -> set[int]:
        """Addresses of all return instructions that the probed functions can end at."""
        names = {n for f in layout.FUNCTIONS for n in self.reached(f)}
        if everywhere:
            names = set(self.functions)
        return {at for n in names for at, words in self.functions[n] if _RETURN.match(words)}
