"""What the expert cache gains, and what it costs where there is nothing to gain.

Real llama-server, models with random weights, one memory limit for both sides (page cache
included), the model's page cache dropped before each start, sides in turns, the first
request of each server not counted. Stock is at its best: the number of threads, the
read-ahead of the disk and whether threads spin or sleep at barriers (OMP_WAIT_POLICY) are
chosen by a sweep before; for the cache the last of these. All with --no-repack, since the
bits are compared too: texts must be equal.

- decode_ratio, prefill64_ratio, prefill512_ratio: cache against stock, a model of
  4.3 GiB (24 layers × 64 experts of 2.5 MiB, 8 used, Q4_K) under 2 GiB;
- bound_share: the time per token that nothing could beat (the larger of computing with
  everything in memory, and reading the same misses in the same order with nothing to
  compute), over the cache's;
- fits_decode_ratio, fits_prefill_ratio: the same model without a limit, all in the cache;
- large_experts_ratio: decode, few large experts (8 layers × 32 experts of 12.6 MiB, 4 used,
  MXFP4), 21 % of them in the cache, 1.2 GiB for all;
- uring_*, pool_*: reading the same experts with nothing to compute, io_uring and the pool of
  threads: GB/s, and processor seconds for a GiB;
- *_per_s, *_mib_per_token: what the ratios are made of; stock_threads, stock_read_ahead_kb,
  stock_sleeps, cache_sleeps: what the sweep chose.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import bound, common
from benchmarks.common import say
from moetuner.demo import llamacpp, model
from moetuner.demo.limits import ReadAhead, cold_server, read_bytes
from moetuner.errors import MoetunerError, NotSo
from moetuner.serve import build, engines

MIB = 1 << 20
LARGE = model.ModelSpec(
    layers=24,
    experts=64,
    experts_used=8,
    embedding=2048,
    feed_forward=768,
    heads=32,
    heads_kv=4,
    expert_type="Q4_K",
    dense_type="Q8_0",
    token_spread=3.0,
)
FEW_LARGE = model.ModelSpec(
    family="gpt-oss",
    layers=8,
    experts=32,
    experts_used=4,
    embedding=2880,
    feed_forward=2880,
    heads=64,
    heads_kv=8,
    expert_type="MXFP4",
    dense_type="Q8_0",
    token_spread=3.0,
)
CORES = len(os.sched_getaffinity(0))
STOCK_THREADS = tuple(CORES * n for n in (1, 2, 4, 8))
READ_AHEAD_KB = (32, 64, 128, 256)
PREFILLS = (64, 512)
LIMIT_MIB, CACHE_MIB = 2048, 1280
FEW_LARGE_LIMIT_MIB = 1229
WAIT = ("active", "passive")
PARTS = ("large", "fits", "few-large", "readers")


@dataclass(frozen=True)
class Setting:
    """One side: stock if `cache_mib` is None."""

    threads: int
    read_ahead_kb: int
    cache_mib: int | None = None
    wait: str = "active"  # OMP_WAIT_POLICY: do threads spin or sleep at barriers


STOCK = Setting(CORES, 128)


@dataclass(frozen=True)
class Requests:
    """What each server is asked: warm-up, decode, then prompts of these lengths."""

    warm_tokens: int
    decode_tokens: int
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Rates in tokens/s; `read_mib`: from the disk, per decoded token; `slots` of the cache, and
    its `misses` in the decoding request."""

    decode: float
    prefill: tuple[float, ...]
    read_mib: float
    text: str
    slots: int
    misses: int


@dataclass
class Bench:
    llama: llamacpp.LlamaBuild
    plugin: build.Plugin
    programs: Path  # of engine/bench
    directory: Path
    rounds: int

    def sample(
        self,
        path: Path,
        setting: Setting,
        ask: Requests,
        limit_mib: int | None,
        **settings: object,
    ) -> Sample:
        """One server's life. `settings`: further MOETUNER_ variables for the cache."""
        arguments = ["--threads", str(setting.threads), "--ctx-size", "2048", "--no-warmup"]
        arguments.append("--no-repack")
        environment = {"OMP_WAIT_POLICY": setting.wait} if setting.wait != "active" else {}
        if setting.cache_mib is None:
            arguments.append("--cpu-moe")
        else:
            arguments += build.OVERRIDE
            environment |= self.plugin.environment(cache_mib=setting.cache_mib, **settings)
        with contextlib.ExitStack() as stack:
            ahead = stack.enter_context(contextlib.closing(ReadAhead(path)))
            ahead.set(setting.read_ahead_kb)
            log = self.directory / "server.log"
            log.unlink(missing_ok=True)
            limit = None if limit_mib is None else limit_mib * MIB
            server = stack.enter_context(
                cold_server(self.llama.server, path, log, arguments, environment, limit)
            )
            server.complete(_tokens(64, 1), ask.warm_tokens, 1800)
            before, (_, missed) = read_bytes(server.pid), _cache(server.pid)
            decoded = server.complete(_tokens(8, 2), ask.decode_tokens, 1800)
            read = read_bytes(server.pid) - before
            slots, misses = _cache(server.pid)
            misses -= missed
            prompts = [server.complete(_tokens(n, 3 + n), 1, 1800) for n in ask.prompts]
        return Sample(
            decoded.tokens_per_second,
            tuple(prompt.prompt_tokens_per_second for prompt in prompts),
            read / MIB / (ask.decode_tokens + 8),
            decoded.text + "".join(prompt.text for prompt in prompts),
            slots,
            misses,
        )

    def interleaved(
        self, path: Path, sides: Sequence[Setting], ask: Requests, limit_mib: int | None
    ) -> list[list[Sample]]:
        """The sides' samples by round; NotSo if their texts differ."""
        rounds: list[list[Sample]] = []
        for number in range(self.rounds):
            order = list(range(len(sides)))[:: 1 if number % 2 == 0 else -1]
            got = {index: self.sample(path, sides[index], ask, limit_mib) for index in order}
            rounds.append([got[index] for index in range(len(sides))])
            rates = " / ".join(f"{sample.decode:.2f}" for sample in rounds[-1])
            say(f"  round {number + 1} of {self.rounds}: {rates} tok/s")
            if len({sample.text for sample in rounds[-1]}) > 1:
                raise NotSo("the cache changed the text", f"see {self.directory}")
        return rounds

    def best(
        self, path: Path, limit_mib: int, setting: Setting, axes: Mapping[str, Sequence[object]]
    ) -> Setting:
        """`setting` with the fastest decode, one field of `axes` after the other."""
        ask = Requests(8, 24)
        rates: dict[Setting, float] = {}
        for name, values in axes.items():
            for value in values:
                # mypy cannot know the field's type.
                other = replace(setting, **{name: value})  # type: ignore[arg-type]
                if other not in rates:
                    rates[other] = self.sample(path, other, ask, limit_mib).decode
                    say(f"  {_described(other)}: {rates[other]:.2f} tok/s")
            setting = max(rates, key=lambda known: rates[known])
        return setting

    def best_sides(
        self, path: Path, limit_mib: int, cache_mib: int, ask: Requests
    ) -> tuple[Setting, Setting, list[list[Sample]]]:
        """Stock and the cache, each at its best, and their samples by round."""
        stock = self.best(path, limit_mib, STOCK, STOCK_AXES)
        cached = self.best(path, limit_mib, replace(STOCK, cache_mib=cache_mib), CACHE_AXES)
        return stock, cached, self.interleaved(path, (stock, cached), ask, limit_mib)


STOCK_AXES = {"threads": STOCK_THREADS, "read_ahead_kb": READ_AHEAD_KB, "wait": WAIT}
CACHE_AXES = {"wait": WAIT}


def _described(setting: Setting) -> str:
    kind = "stock" if setting.cache_mib is None else f"cache of {setting.cache_mib} MiB"
    return (
        f"{kind}, -t {setting.threads}, read-ahead {setting.read_ahead_kb} KiB, "
        f"{setting.wait} waiting"
    )


def main() -> int:
    # Its default action would leave the read-ahead changed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="benchmarks/expert_cache", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append")
    options = parser.parse_args()
    parts = options.only or PARTS
    figures: dict[str, float] = {}
    with common.workspace() as directory:
        llama = llamacpp.ensure()
        home = llamacpp.cache_directory()
        plugin = build.ensure(llama.source, llama.build, home)
        programs = bound.programs(llama, home)
        bench = Bench(llama, plugin, programs, directory, options.rounds)
        ensure = partial(model.ensure, directory=home / "models")
        if "large" in parts:
            say("a model of 4.3 GiB under 2 GiB")
            figures |= large(bench, ensure(LARGE))
        if "fits" in parts:
            say("the same model without a limit")
            figures |= fits(bench, ensure(LARGE))
            say("the least time for a token")
            figures |= bound_share(bench, ensure(LARGE), figures["fits_stock_per_s"])
        if "few-large" in parts:
            say("few large experts")
            figures |= few_large(bench, ensure(FEW_LARGE))
        if "readers" in parts:
            say("reading with nothing to compute")
            figures |= bound.readers(ensure(LARGE), programs, options.rounds)
    common.report("expert_cache", figures)
    return 0


def large(bench: Bench, path: Path) -> dict[str, float]:
    stock, cached, rounds = bench.best_sides(path, LIMIT_MIB, CACHE_MIB, Requests(16, 64, PREFILLS))
    figures = {
        "stock_threads": float(stock.threads),
        "stock_read_ahead_kb": float(stock.read_ahead_kb),
        "stock_sleeps": float(stock.wait == "passive"),
        "cache_sleeps": float(cached.wait == "passive"),
        "decode_ratio": _ratio(rounds, _decode),
        "stock_per_s": _median(rounds, 0, _decode),
        "cache_per_s": _median(rounds, 1, _decode),
        "stock_mib_per_token": _median(rounds, 0, _read_mib),
        "cache_mib_per_token": _median(rounds, 1, _read_mib),
    }
    for index, length in enumerate(PREFILLS):
        figures[f"prefill{length}_ratio"] = _ratio(rounds, _prefill(index))
        figures[f"cache_prefill{length}_per_s"] = _median(rounds, 1, _prefill(index))
    return figures


def fits(bench: Bench, path: Path) -> dict[str, float]:
    ask = Requests(64, 128, (512, 512))
    size = path.stat().st_size // MIB + 1
    rounds = bench.interleaved(path, (STOCK, replace(STOCK, cache_mib=size)), ask, None)
    return {
        "fits_decode_ratio": _ratio(rounds, _decode),
        "fits_prefill_ratio": _ratio(rounds, _prefill(1)),
        "fits_stock_per_s": _median(rounds, 0, _decode),
        "fits_stock_prefill512_per_s": _median(rounds, 0, _prefill(1)),
    }


def bound_share(bench: Bench, path: Path, resident_per_s: float) -> dict[str, float]:
    """`resident_per_s`: stock's rate with everything in memory."""
    ask = Requests(16, 64)
    trace, plan = bench.directory / "trace", bench.directory / "plan"
    cached = replace(STOCK, cache_mib=CACHE_MIB, wait="passive")
    shares = []
    for number in range(bench.rounds):
        trace.unlink(missing_ok=True)
        got = bench.sample(path, cached, ask, LIMIT_MIB, trace=trace)
        # The last evaluations; the first of the tokens came with the prompt.
        missed = bound.misses(trace, got.slots)
        by_trace = sum(map(len, missed[-ask.decode_tokens :]))  # the prompt's evaluation too
        say(f"  {by_trace} misses by the trace, {got.misses} by the cache's count")
        evaluations = missed[-(ask.decode_tokens - 1) :]
        order = list(itertools.chain.from_iterable(evaluations))
        reading = bound.read_seconds(path, order, plan, bench.programs) / len(evaluations)
        least = max(reading, 1 / resident_per_s)
        shares.append(least * got.decode)
        say(
            f"  round {number + 1} of {bench.rounds}: {1000 / got.decode:.0f} ms a token; reading "
            f"{1000 * reading:.0f} ms, computing {1000 / resident_per_s:.0f} ms"
        )
    return {"bound_share": statistics.median(shares)}


def few_large(bench: Bench, path: Path) -> dict[str, float]:
    share = FEW_LARGE.unit_bytes() * FEW_LARGE.experts * FEW_LARGE.layers * 21 // 100 // MIB
    _, _, rounds = bench.best_sides(path, FEW_LARGE_LIMIT_MIB, share, Requests(8, 32))
    return {
        "large_experts_ratio": _ratio(rounds, _decode),
        "large_experts_stock_per_s": _median(rounds, 0, _decode),
        "large_experts_stock_mib_per_token": _median(rounds, 0, _read_mib),
        "large_experts_cache_mib_per_token": _median(rounds, 1, _read_mib),
    }


def _decode(sample: Sample) -> float:
    return sample.decode


def _read_mib(sample: Sample) -> float:
    return sample.read_mib


def _prefill(index: int) -> Callable[[Sample], float]:
    return lambda sample: sample.prefill[index]


def _ratio(rounds: Sequence[Sequence[Sample]], value: Callable[[Sample], float]) -> float:
    """Median over the rounds of the second side's value over the first's."""
    return statistics.median(value(side[1]) / value(side[0]) for side in rounds)


def _median(
    rounds: Sequence[Sequence[Sample]], side: int, value: Callable[[Sample], float]
) -> float:
    return statistics.median(value(samples[side]) for samples in rounds)


def _cache(pid: int) -> tuple[int, int]:
    """Slots and misses so far of the cache in that process; zeros: there is none."""
    for engine in engines.find():
        if engine.pid == pid:
            figures = engine.read().figures
            return figures.slots, figures.misses
    return 0, 0


def _tokens(count: int, seed: int) -> list[int]:
    """Some syllables of the model's vocabulary, which the tokenizer would hardly give."""
    state = seed
    tokens = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append(256 + (state >> 33) % 150)
    return tokens


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetunerError as error:
        say(f"expert_cache: {error}")
        sys.exit(error.exit_code)
