"""The least time for a token with an expert cache: what misses take when nothing is computed.

From a router trace and the size of the cache the misses follow, since the cache's policy is
LRU; moetuner_replay_bench reads them in their order at full depth.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf

from benchmarks.common import say
from moetuner.demo.llamacpp import LlamaBuild
from moetuner.errors import SystemRefused
from moetuner.serve import build, trace

Unit = tuple[int, int]  # layer, expert
SLICES = ("gate", "up", "down")


def misses(path: Path, slots: int) -> list[list[Unit]]:
    """Misses of a cache that was empty at the trace's start, for each evaluation.

    The experts of one layer in one evaluation are used together: those that are there are
    never given up for those that are not.
    """
    present: OrderedDict[Unit, None] = OrderedDict()  # the least recently used first
    result: list[list[Unit]] = []
    for _, events in groupby(_events(path), key=lambda event: event[0]):
        missed: list[Unit] = []
        for _, units in events:
            here = [unit for unit in units if unit in present]
            for unit in here:
                present.move_to_end(unit)
            for unit in units:
                if unit in present:
                    continue
                missed.append(unit)
                if len(present) >= slots:
                    present.popitem(last=False)
                present[unit] = None
        result.append(missed)
    return result


def _events(path: Path) -> Iterator[tuple[int, list[Unit]]]:
    """(evaluation, units in the order of their first use) of each layer."""
    rows = trace.read(path).rows
    for (evaluation, layer), group in groupby(
        rows, key=lambda row: (int(row["evaluation"]), int(row["layer"]))
    ):
        units = dict.fromkeys((layer, int(e)) for row in group for e in row["experts"])
        yield evaluation, list(units)


def programs(llama: LlamaBuild, home: Path) -> Path:
    """The directory with those of engine/bench, built first if need be."""
    targets = ("moetuner_replay_bench", "moetuner_read_bench")
    options = {**build.NO_TESTS, "MOETUNER_BUILD_BENCH": "ON"}
    built = build.ensure(
        llama.source, llama.build, home, kind="bench", targets=targets, options=options
    )
    return built.directory


def read_seconds(
    model: Path, order: list[Unit], plan: Path, programs: Path, rounds: int = 3
) -> float:
    """Median time to read these units in this order at full depth. `plan`: a file to write."""
    places = _places(model)
    lines = (" ".join(f"{at} {size}" for at, size in places[unit]) for unit in order)
    plan.write_text("".join(f"{line}\n" for line in lines))
    runs = _run(programs, "moetuner_replay_bench", str(model), str(plan), str(rounds))
    seconds = statistics.median(float(run["seconds"]) for run in runs)
    say(
        f"  {len(order)} misses, {runs[0]['bytes'] / 2**20:.0f} MiB in {seconds:.2f} s with "
        f"nothing to compute ({runs[0]['reader']})"
    )
    return seconds


def _places(model: Path) -> dict[Unit, list[tuple[int, int]]]:
    """Offset and bytes of each slice of each unit."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    places: dict[Unit, list[tuple[int, int]]] = {}
    for kind in SLICES:
        for name, tensor in tensors.items():
            if not name.endswith(f".ffn_{kind}_exps.weight"):
                continue
            experts = int(tensor.shape[-1])
            size = int(tensor.n_bytes) // experts
            for expert in range(experts):
                unit = (int(name.split(".")[1]), expert)
                at = int(tensor.data_offset) + expert * size
                places.setdefault(unit, []).append((at, size))
    return places


def readers(model: Path, programs: Path, rounds: int) -> dict[str, float]:
    """Speed and processor time of both kinds of reader at their defaults, nothing computed."""
    size = str(model.stat().st_size >> 30)  # of it random experts are read
    words = ("--file", str(model), "--gib", size, "--rounds", str(rounds))
    runs = _run(programs, "moetuner_read_bench", *words)
    figures = {}
    for name, chosen in (("uring", {"depth": 32}), ("pool", {"threads": 8})):
        mine = [run for run in runs if chosen.items() <= run.items()]
        for key in ("gb_per_s", "cpu_s_per_gib"):
            figures[f"{name}_{key}"] = statistics.median(float(run[key]) for run in mine)
    return figures


def _run(directory: Path, target: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs a program of engine/bench; the JSON objects that it printed."""
    command = [str(directory / "bench" / target), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemRefused(f"{' '.join(command)} ended with status {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]
