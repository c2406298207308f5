"""How `moetuner engine` looks: what the caches of running engines do, as lines, JSON or live."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NoReturn, Protocol

from moetuner.errors import MoetunerError, NotSo, UsageError
from moetuner.log import printable
from moetuner.serve import engines, page
from moetuner.serve.engines import Engine, Snapshot
from moetuner.serve.page import Figures

Rows = list[tuple[str, str]]  # (heading, text); a heading is empty where it repeats

# How long `set` waits for the engine to say that it has seen the wishes.
OBEDIENCE_S = 2.0


class Display(Protocol):
    """Where rows go; moetuner/live.py is one."""

    def show(self, rows: Rows) -> None: ...

    def watch(self, title: str, current: Callable[[], Rows]) -> NoReturn: ...


def run(options: argparse.Namespace, display: Display) -> int:
    """The exit code of `moetuner engine`."""
    if options.engine_command == "set":
        return _set(options)
    if options.watch:
        display.watch("moetuner engine", partial(_current, options.pid, {}))
    found = _found(options.pid)
    if options.json:
        json.dump([_as_json(*entry) for entry in found], sys.stdout, indent=1)
        print()
        return 0
    for index, (engine, snapshot) in enumerate(found):
        print("\n" if index else "", end="")
        display.show(rows(engine, snapshot))
    return 0


def _found(pid: int | None) -> list[tuple[Engine, Snapshot | NotSo]]:
    """NotSo if there is none."""
    found: list[tuple[Engine, Snapshot | NotSo]] = []
    for engine in _engines(pid):
        try:
            found.append((engine, engine.read()))
        except NotSo as error:
            found.append((engine, error))
        except MoetunerError as error:
            found.append((engine, NotSo(error.message, error.hint)))
    return found


def _engines(pid: int | None) -> list[Engine]:
    found = [engine for engine in engines.find() if pid in (None, engine.pid)]
    if not found:
        where = "no engine runs" if pid is None else f"process {pid} runs no engine"
        hint = "" if os.geteuid() == 0 else "; other users' are seen by root only"
        raise NotSo(where, f"it has one from its first token on{hint}")
    return found


def _as_json(engine: Engine, snapshot: Snapshot | NotSo) -> dict[str, object]:
    known: dict[str, object] = {"pid": engine.pid, "name": engine.name}
    if isinstance(snapshot, NotSo):
        return {**known, "error": str(snapshot)}
    figures = asdict(snapshot.figures)
    control = asdict(snapshot.control)
    del control["trace_file"]
    return {
        **known,
        "model": snapshot.identity.model,
        "commit": snapshot.identity.commit,
        "made": snapshot.identity.made,
        **figures,
        "state": page.STATES.get(snapshot.figures.state, "unknown"),
        "trace_state": page.TRACE_STATES.get(snapshot.figures.trace_state, "unknown"),
        "control": control,
        "layers": [asdict(layer) for layer in snapshot.layers],
    }


def rows(engine: Engine, snapshot: Snapshot | NotSo, since: Figures | None = None) -> Rows:
    """For people. `since`: earlier figures of the same engine; then rates are shown."""
    who = f"pid {engine.pid} {printable(engine.name)}"
    if isinstance(snapshot, NotSo):
        return [("engine", f"{who}: {printable(str(snapshot))}")]
    f = snapshot.figures
    state = page.STATES.get(f.state, "unknown state")
    failed = f", {f.failed} operations failed" if f.failed else ""
    lines = [
        ("engine", f"{who}: {state}{failed}"),
        ("model", f"{printable(snapshot.identity.model)} ({_mib(f.model_bytes)} of experts)"),
        ("cache", _cache(f)),
        ("found", _share(f)),
        ("read", _reads(f)),
        ("waited", f"{f.wait_ns / 1e9:.1f} s in {f.waits} waits, summed over threads"),
        ("threads", f"{f.threads} of -t {f.threads_given}"),
    ]
    if since is not None:
        lines[1:1] = [("now", _rates(since, f))]
    lines.append(("trace", _trace(f)))
    return lines


def _cache(f: Figures) -> str:
    locked = "locked" if f.locked_bytes >= f.arena_bytes else f"{_mib(f.locked_bytes)} locked"
    return (
        f"{_mib(f.arena_bytes)}, {locked}: {f.used_slots} of {f.slots} slots used, "
        f"{f.units} experts in all layers"
    )


def _share(f: Figures) -> str:
    asked = f.hits + f.joined + f.misses
    if not asked:
        return "nothing was asked for yet"
    return (
        f"{100 * f.hits / asked:.1f} % of {asked} experts asked for, {f.misses} had to be read "
        f"({f.tokens} tokens, {f.evaluations} evaluations)"
    )


def _reads(f: Figures) -> str:
    text = f"{_mib(f.bytes)} in {f.reads} reads, at most {f.depth} at once"
    slowest = _quantile(f.latency, 0.99)
    if slowest:
        text += f", half below {_us(_quantile(f.latency, 0.5))}, 99 % below {_us(slowest)}"
    counts = (("retried", f.retries), ("buffered", f.buffered), ("failed", f.failures))
    return text + "".join(f", {count} {name}" for name, count in counts if count)


def _rates(a: Figures, b: Figures) -> str:
    seconds = (b.published_ns - a.published_ns) / 1e9
    # Older figures than before: another engine has the place. The same: nothing was computed.
    if seconds <= 0:
        return "idle"
    asked = b.hits + b.joined + b.misses - a.hits - a.joined - a.misses
    found = f", {100 * (b.hits - a.hits) / asked:.1f} % found" if asked > 0 else ""
    return (
        f"{(b.tokens - a.tokens) / seconds:.1f} tokens/s{found}, "
        f"{_mib(max(0, b.bytes - a.bytes) / seconds)}/s read"
    )


def _trace(f: Figures) -> str:
    if f.trace_state == 0:
        return "off"
    if f.trace_state == 1:
        lost = f", {f.trace_lost} lost" if f.trace_lost else ""
        return f"{f.trace_rows} rows to {printable(f.trace_file)}{lost}"
    why = os.strerror(f.trace_errno) if f.trace_errno < 4096 else "unknown reason"
    return f"ended: {printable(f.trace_file)} {why}" if f.trace_file else f"not begun: {why}"


def _quantile(latency: Sequence[int], share: float) -> int:
    """µs that so many reads are below, a power of two; 0: there were none."""
    total, below = sum(latency), 0
    for bucket, count in enumerate(latency):
        below += count
        if below and below >= share * total:
            return 1 << (bucket + 1)
    return 0


def _mib(count: float) -> str:
    mib = count / (1 << 20)
    return f"{mib:.0f} MiB" if mib >= 100 else f"{mib:.1f} MiB"


def _us(us: int) -> str:
    return f"{us} µs" if us < 1000 else f"{us / 1000:.1f} ms"


def _current(pid: int | None, recent: dict[tuple[int, int], Figures]) -> Rows:
    """All engines, with rates since the last time; `recent`: each engine's figures then."""
    try:
        found = _found(pid)
    except NotSo as error:
        return [("engine", str(error))]
    lines: Rows = []
    for engine, snapshot in found:
        before = None
        if isinstance(snapshot, Snapshot):
            before = recent.get(engine.key, snapshot.figures)
            recent[engine.key] = snapshot.figures
        lines += rows(engine, snapshot, before)
    return lines


def _set(options: argparse.Namespace) -> int:
    trace = _trace_wish(options.trace)
    if options.depth is None and options.threads is None and trace is None:
        raise UsageError(
            "nothing to set: --depth, --threads or --trace", "moetuner engine set --help"
        )
    chosen = _engines(options.pid)
    pids = sorted({engine.pid for engine in chosen})
    if len(pids) > 1:
        numbers = ", ".join(map(str, pids))
        raise UsageError(f"several engines run: --pid says which ({numbers})")
    wanted = [
        (engine, engine.control(depth=options.depth, threads=options.threads, trace=trace))
        for engine in chosen
    ]
    for engine, generation in wanted:
        figures = _await(engine, generation)
        who = f"pid {engine.pid} {printable(engine.name)}"
        if figures is None:
            print(f"{who}: written; it takes effect with the next token")
            continue
        print(
            f"{who}: {figures.depth} reads at once (at most {figures.depth_max}), "
            f"{figures.threads} threads of -t {figures.threads_given}, trace {_trace(figures)}"
        )
        if options.trace not in (None, "off") and figures.trace_state != 1:
            raise NotSo(f"pid {engine.pid} does not record: {_trace(figures)}")
    return 0


def _trace_wish(name: str | None) -> bytes | None:
    if name is None or name == "off":
        return None if name is None else b""
    # The engine's working directory is another one.
    path = os.fsencode(os.path.abspath(name))
    if not name or b"\0" in path or len(path) >= page.TEXT_BYTES:
        raise UsageError(f"--trace: a file name of at most {page.TEXT_BYTES - 1} bytes, or off")
    return path


def _await(engine: Engine, generation: int) -> Figures | None:
    """What is so once the engine has obeyed; None if it did nothing in OBEDIENCE_S."""
    deadline = time.monotonic() + OBEDIENCE_S
    while True:
        figures = engine.read().figures
        if figures.applied == generation:
            return figures
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
