"""What the probes cost the probed program.

- call_us: added time of one call (entry and return) in µs: a library under llama.cpp's
  names with the probes in it, against the same code under other names, calls in a row,
  in turns; the median of the differences. As the daemon does it by default, and with
  `watch.returns: uretprobe`.
- loss_percent: how much slower llama-bench decodes while the daemon watches it, with a
  model that makes about 100 tokens a second on one core of the development machine:
  pairs with and without the daemon, the order changing from pair to pair; the median of
  the pairs' differences, and half of the middle half's width as its uncertainty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import common
from benchmarks.common import Caller, Daemon, Native, say
from moetuner.demo import llamacpp, model
from moetuner.errors import MoetunerError, SystemRefused

CALLS = 20_000
MODEL = model.ModelSpec(layers=8, experts=4, embedding=1024, feed_forward=2048)
SETTLE_S = 2.0  # the daemon's start, and the processes that it looks at


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/probe_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with common.workspace() as directory:
        native = common.compile_native(directory)
        figures = {
            "call_us": _call_us(directory / "default", native, "auto", options.rounds),
            "call_us_uretprobe": _call_us(
                directory / "uretprobe", native, "uretprobe", options.rounds
            ),
            **_loss(directory, options.rounds),
        }
    common.report("probe_cost", figures)
    return 0


def _call_us(directory: Path, native: Native, returns: str, rounds: int) -> float:
    directory.mkdir()
    daemon = Daemon(directory, _settings(native.watched, returns))
    probed, plain = Caller(native), Caller(native, watched=False)
    try:
        daemon.start(native.watched)
        probed("call 100")
        differences = []
        for _ in range(rounds):
            differences.append(probed(f"call {CALLS}") - plain(f"call {CALLS}"))
    finally:
        probed.close()
        plain.close()
        daemon.stop()
    cost = common.median(differences) / CALLS * 1e6
    say(f"a call with returns={returns}: {cost:.2f} µs")
    return cost


def _loss(directory: Path, rounds: int) -> dict[str, float]:
    build = llamacpp.ensure()
    path = model.ensure(MODEL, llamacpp.cache_directory() / "models")
    daemon = Daemon(directory, _settings(build.libllama, "auto"))
    losses: list[float] = []
    rates: list[float] = []
    _tokens_per_s(build.bench, path)  # the file into memory

    def watched() -> float:
        daemon.start(build.libllama)
        try:
            time.sleep(SETTLE_S)
            return _tokens_per_s(build.bench, path)
        finally:
            daemon.stop()

    def plain() -> float:
        time.sleep(SETTLE_S)
        return _tokens_per_s(build.bench, path)

    for number in range(rounds):
        if number % 2:
            without, with_daemon = plain(), watched()
        else:
            with_daemon, without = watched(), plain()
        losses.append((1 - with_daemon / without) * 100)
        rates.append(without)
        say(f"{number + 1} of {rounds}: {with_daemon:.1f} tok/s watched, {without:.1f} not")
    quartiles = statistics.quantiles(losses, n=4)
    return {
        "loss_percent": common.median(losses),
        "loss_uncertainty_percent": (quartiles[2] - quartiles[0]) / 2,
        "tokens_per_s": common.median(rates),
    }


def _tokens_per_s(bench: Path, path: Path) -> float:
    command = [str(bench), "-m", str(path), "-p", "0", "-n", "64", "-r", "3", "-t", "1"]
    output = subprocess.run(
        [*command, "-ncmoe", "99", "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    try:
        return float(json.loads(output)[0]["avg_ts"])
    except (ValueError, LookupError):
        raise SystemRefused(f"llama-bench gave no result: {output[:200]!r}") from None


def _settings(library: Path, returns: str) -> str:
    return f"watch: {{libraries: [{library}], returns: {returns}}}\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetunerError as error:
        say(f"probe_cost: {error}")
        sys.exit(error.exit_code)
