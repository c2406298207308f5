"""The expert cache beside stock llama.cpp: one model, one memory limit, the same request.

The model is larger than the limit, which holds for page cache and server together, as on
a board whose memory is all there is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetuner.demo.console import Console
from moetuner.demo.limits import ReadAhead, cold_server, read_bytes
from moetuner.demo.llamacpp import LlamaBuild
from moetuner.demo.model import ModelSpec, ensure
from moetuner.demo.services import Answer
from moetuner.demo.show import PROMPT, Check, Outcome
from moetuner.serve import build

MIB = 1 << 20
# 510 MB, of which a token uses 64: small enough to be made, loaded and read in seconds.
SPEC = ModelSpec(
    layers=12,
    experts=32,
    experts_used=4,
    embedding=1024,
    feed_forward=768,
    heads=16,
    heads_kv=4,
    expert_type="Q4_K",
    token_spread=2.0,
)
LIMIT_MIB, CACHE_MIB = 320, 176
TOKENS, WARM_TOKENS = 64, 8
# The usual one. With a larger read-ahead stock reads experts that it does not use.
READ_AHEAD_KB = 128


@dataclass(frozen=True)
class Side:
    """What one server did: its answer, and what the disk gave for each token of it."""

    name: str
    answer: Answer
    mib_per_token: float


def compare(
    llama: LlamaBuild, directory: Path, cache: Path, console: Console, outcome: Outcome
) -> None:
    """Plays both sides and adds what must hold to `outcome`: the texts are the same.

    `cache`: where models and builds are kept. MoetunerError: why it cannot be played.
    """
    console.line()
    console.step("The expert cache beside stock llama.cpp")
    model = ensure(SPEC, cache / "models")
    console.line(
        f"  {model} ({model.stat().st_size / MIB:.0f} MiB), for which there are {LIMIT_MIB} MiB"
    )
    plugin = build.ensure(llama.source, llama.build, cache)
    console.line(f"  {plugin.path}")
    play = _Play(llama, model, directory)
    with contextlib.closing(ReadAhead(model)) as ahead:
        ahead.set(min(ahead.found_kb, READ_AHEAD_KB))
        cores = len(os.sched_getaffinity(0))
        # Each side as it is fastest: threads that wait for page faults leave cores to others.
        stock = play.side("stock", 4 * cores, ["--cpu-moe"], {})
        settings = {**plugin.environment(cache_mib=CACHE_MIB), "OMP_WAIT_POLICY": "passive"}
        ours = play.side(f"cache of {CACHE_MIB} MiB", cores, build.OVERRIDE, settings)
    _show((stock, ours), console)
    same = Check(stock.answer.text == ours.answer.text, "both wrote the same text")
    outcome.checks.append(same)
    console.check(same.held, same.text)


@dataclass(frozen=True)
class _Play:
    llama: LlamaBuild
    model: Path
    directory: Path

    def side(
        self, name: str, threads: int, arguments: Sequence[str], env: Mapping[str, str]
    ) -> Side:
        """One server's life: start with nothing of the model in memory, warm up, be asked."""
        words = ["--no-repack", "--no-warmup", "--threads", str(threads), "--ctx-size", "1024"]
        words += arguments
        log = self.directory / f"llama-server-{'cache' if env else 'stock'}.log"
        with cold_server(self.llama.server, self.model, log, words, env, LIMIT_MIB * MIB) as server:
            server.complete(PROMPT, WARM_TOKENS)
            before = read_bytes(server.pid)
            answer = server.complete(PROMPT, TOKENS)
            read = read_bytes(server.pid) - before
        # The prompt's tokens read experts too.
        return Side(
            f"{name}, -t {threads}", answer, read / MIB / (answer.tokens + answer.prompt_tokens)
        )


def _show(sides: Sequence[Side], console: Console) -> None:
    console.line(f"  {'':<26} {'prompt tok/s':>12} {'decode tok/s':>12} {'MiB/token read':>14}")
    for side in sides:
        answer = side.answer
        console.line(
            f"  {side.name:<26} {answer.prompt_tokens_per_second:>12.2f} "
            f"{answer.tokens_per_second:>12.2f} {side.mib_per_token:>14.1f}"
        )
    ratio = sides[1].answer.tokens_per_second / sides[0].answer.tokens_per_second
    console.line(f"  decode: × {ratio:.2f}", "green" if ratio > 1 else "yellow")
