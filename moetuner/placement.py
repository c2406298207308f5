"""Which expert tensors an ordered list of llama.cpp's overrides keeps on the CPU.

llama.cpp places a tensor by the first pattern that is found in its name. Patterns on a
command line are a stranger's, and a backtracking search can take for ever: see Placement.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import regex

from moetuner.ecmascript import translate

LAYERS = 512  # LLAMA_MAX_LAYERS
# The chunk experts (chexps) belong to GroveMoE. Shared experts (shexp) are computed for
# every token, wherever they lie: they are no reason to count, nor are biases.
EXPERT_TENSORS = (
    "blk.*.ffn_up_exps.weight",
    "blk.*.ffn_down_exps.weight",
    "blk.*.ffn_gate_exps.weight",
    "blk.*.ffn_gate_up_exps.weight",
    "blk.*.ffn_up_chexps.weight",
    "blk.*.ffn_down_chexps.weight",
    "blk.*.ffn_gate_chexps.weight",
)
BUDGET_S = 0.2  # for all the patterns of a process; a usual command line takes 0.003 s


@dataclass(frozen=True)
class Override:
    """Tensors in whose name `pattern` is found go to `buffer_type`.

    Either the user's `own` pattern, as std::regex takes it; or one that a flag stands
    for: it is looked for in templates such as EXPERT_TENSORS, and holds below `layers`.
    `said` is how the process was told, such as `--n-cpu-moe 30`.
    """

    pattern: str
    buffer_type: str
    said: str = field(compare=False)
    own: bool = False
    layers: int = LAYERS


class Placement:
    """Applies lists of overrides to the names of expert tensors.

    `tensors`: names beside EXPERT_TENSORS, `*` for the layer's number. `buffer_types`:
    those that are the CPU's (fnmatch patterns). An object is for one process: all
    patterns together get BUDGET_S seconds, and one that takes longer or is not
    understood counts as found nowhere; `notes` say which and why.

    Tensor number i is template i % width in layer i // width.
    """

    def __init__(self, tensors: Sequence[str], buffer_types: Sequence[str]) -> None:
        self.notes: list[str] = []
        # A line feed separates names in _text.
        self._templates = [t for t in (*EXPERT_TENSORS, *tensors) if "\n" not in t]
        self._width = len(self._templates)
        self._buffer_types = buffer_types
        self._deadline = time.monotonic() + BUDGET_S

    def expert_on_cpu(self, overrides: Sequence[Override]) -> str | None:
        """What keeps an expert on the CPU, if anything; its first tensor for a user's pattern."""
        elsewhere: set[int] = set()  # tensors that an earlier override places
        earlier: list[Override] = []  # those whose tensors are not in there yet
        for override in dict.fromkeys(overrides):  # a second time changes nothing
            if not any(fnmatchcase(override.buffer_type, name) for name in self._buffer_types):
                earlier.append(override)
                continue
            for tensor in self._tensors(override):
                while earlier:
                    elsewhere.update(self._tensors(earlier.pop()))
                if tensor not in elsewhere:
                    if not override.own:
                        return override.said
                    return f"{override.said} sends {self._name(tensor)} to {override.buffer_type}"
        return None

    def _name(self, tensor: int) -> str:
        layer, template = divmod(tensor, self._width)
        return self._templates[template].replace("*", str(layer))

    @cached_property
    def _text(self) -> str:
        return "\n".join(map(self._name, range(LAYERS * self._width)))

    def _tensors(self, override: Override) -> Iterator[int]:
        """Every tensor in whose name the pattern is found, in order."""
        if override.own:
            yield from self._search(override)
            return
        names = [i for i, t in enumerate(self._templates) if re.search(override.pattern, t)]
        for layer in range(min(override.layers, LAYERS)):
            for name in names:
                yield layer * self._width + name

    def _search(self, override: Override) -> Iterator[int]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._give_up(override, "was not tried: there was no time left")
            return
        # The package would keep every pattern that it compiled, and even then a note on each
        # that purge() clears: strangers decide how many there are.
        regex.cache_all(False)
        try:
            # One search through all names: one for each would be many times the work when
            # nothing is found. What translate() writes never matches a line feed, and what
            # follows it here takes the rest of the name, so that a name is found once.
            flags = regex.V0 | regex.ASCII | regex.MULTILINE
            pattern: Any = regex.compile(f"(?:{translate(override.pattern)}).*", flags)
            tensor = position = 0
            for found in pattern.finditer(self._text, timeout=left):
                tensor += self._text.count("\n", position, found.start())
                position = found.start()
                yield tensor
        except TimeoutError:
            self._give_up(override, "takes too long")
        except (ValueError, regex.error) as error:
            self._give_up(override, f"is not a pattern for tensor names ({error})")
        finally:
            regex.purge()

    def _give_up(self, override: Override, why: str) -> None:
        self.notes.append(f"{override.said}: {override.pattern[:40]} {why}")
