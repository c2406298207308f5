"""The shared page and the router trace of real programs: what they say is what was computed.

./run-tests engine -k page
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moetuner.errors import NotSo
from moetuner.serve import engines, trace
from moetuner.serve.build import BUFFER_TYPE, OVERRIDE
from moetuner.serve.engines import Engine as Watched
from moetuner.serve.engines import Snapshot
from tests.engine.rig import Engine, run_program
from tests.engine.servers import PROMPTS, TOKENS, Server, Start

Model = Callable[[str], Path]

LIMIT_S = 60
ROW = ("evaluation", "layer", "flags", "row", "rows")


Serve = Callable[..., Server]


@pytest.fixture
def serve(engine: Engine, start: Start) -> Serve:
    """`serve("-m", model, …, cache_mib=…)`: a server with the plugin, ready."""

    def run(*arguments: str | Path, **settings: object) -> Server:
        return start(*arguments, env=engine.environment(**settings))

    return run


def _pages(pid: int) -> list[Watched]:
    return [found for found in engines.find() if found.pid == pid]


def _page(server: Server) -> Watched:
    (found,) = _pages(server.pid)
    return found


def _settled(watched: Watched, what: Callable[[Snapshot], bool]) -> Snapshot:
    deadline = time.monotonic() + LIMIT_S
    while not what(snapshot := watched.read()):
        assert time.monotonic() < deadline, snapshot
        time.sleep(0.02)
    return snapshot


def _plain(rows: NDArray[Any]) -> list[tuple[Any, ...]]:
    """Rows without their times."""
    return [
        (*(int(row[name]) for name in ROW), *(int(expert) for expert in row["experts"]))
        for row in rows
    ]


def test_counters_are_what_was_computed(model: Model, serve: Serve, tmp_path: Path) -> None:
    """The trace says which experts each layer's rows were given to: so many were asked for."""
    server = serve(
        "-m", model("Q4_K"), "--no-warmup", cache_mib=64, trace=tmp_path / "trace", hugepages=0
    )
    for prompt in PROMPTS[:3]:
        server.text(prompt)
    watched = _page(server)
    # An idle engine shows its last figures, however long ago they were.
    snapshot = _settled(watched, lambda now: now.figures.in_flight == 0)
    figures = snapshot.figures
    assert server.stop() == 0
    rows = trace.read(tmp_path / "trace").rows
    layers = sorted(set(rows["layer"].tolist()))
    assert [layer.layer for layer in snapshot.layers] == layers == [0, 1]
    for layer in snapshot.layers:
        mine = rows[rows["layer"] == layer.layer]
        asked = sum(
            len(np.unique(mine[mine["evaluation"] == number]["experts"]))
            for number in np.unique(mine["evaluation"])
        )
        assert layer.hits + layer.joined + layer.misses == asked
        # Everything fits: each expert is read once.
        assert layer.misses == len(np.unique(mine["experts"]))
        assert layer.evictions == 0
    assert figures.hits == sum(layer.hits for layer in snapshot.layers)
    first = rows[rows["layer"] == 0]
    assert figures.tokens == len(first)
    assert figures.evaluations == len(np.unique(rows["evaluation"]))
    assert figures.trace_rows == len(rows)
    assert (figures.trace_state, figures.trace_lost, figures.failed) == (1, 0, 0)
    assert sum(figures.latency) == figures.reads > 0
    per_unit = model("Q4_K").stat().st_size // 16
    assert 0 < figures.bytes <= figures.misses * (per_unit + 3 * 8192)
    assert figures.used_slots == figures.misses
    assert (figures.state, figures.threads, figures.threads_given) == (1, 2, 2)
    assert snapshot.identity.model == str(model("Q4_K"))
    assert snapshot.identity.pid == server.pid


def test_single_tokens(model: Model, serve: Serve) -> None:
    """Layers × tokens × experts used, exactly, in a cache that holds a third of them."""
    server = serve("-m", model("Q4_K"), "--no-warmup", cache_mib=3)
    text = server.text("stone", cache_prompt=True)
    before = _page(server).read()
    # The prompt is known but for its last token, so all are evaluated one by one.
    assert server.text("stone", cache_prompt=True) == text
    after = _page(server).read()
    tokens = after.figures.tokens - before.figures.tokens
    assert tokens == after.figures.evaluations - before.figures.evaluations == TOKENS
    for earlier, later in zip(before.layers, after.layers, strict=True):
        asked = later.hits + later.joined + later.misses
        asked -= earlier.hits + earlier.joined + earlier.misses
        assert asked == tokens * 3
    assert after.figures.evictions > before.figures.evictions
    assert server.stop() == 0


def test_wishes_while_it_runs(
    engine: Engine, model: Model, serve: Serve, stock_texts: list[str]
) -> None:
    """Depth and threads change all the time; the text stays stock's."""
    server = serve("-m", model("Q4_K"), cache_mib=2)
    assert server.text(PROMPTS[0]) == stock_texts[0]
    watched = _page(server)
    over = threading.Event()
    changed = []

    def change() -> None:
        for number in itertools.count():
            if over.wait(0.003):
                return
            # As many of the process's threads as it has cores, at most.
            changed.append(watched.control(depth=1 + number % 7, threads=number % 4))

    controller = threading.Thread(target=change)
    controller.start()
    try:
        texts = [server.text(prompt) for prompt in PROMPTS[:6]]
    finally:
        over.set()
        controller.join()
    assert texts == stock_texts[:6]
    assert len(changed) > 10
    generation = watched.control(depth=5, threads=1)
    assert server.text(PROMPTS[1]) == stock_texts[1]
    figures = watched.read().figures
    assert (figures.applied, figures.depth, figures.threads) == (generation, 5, 1)
    assert figures.threads_given == 2
    generation = watched.control(depth=1 << 31, threads=(1 << 32) - 1)
    assert server.text(PROMPTS[2]) == stock_texts[2]
    figures = watched.read().figures
    assert figures.applied == generation
    assert figures.depth == figures.depth_max
    assert figures.threads <= max(2, len(os.sched_getaffinity(0)))
    watched.control(depth=0, threads=0)
    assert server.text(PROMPTS[3]) == stock_texts[3]
    figures = watched.read().figures
    assert (figures.depth, figures.threads) == (32, 2)
    assert server.stop() == 0


def test_a_trace_of_a_running_server(
    model: Model, serve: Serve, stock_texts: list[str], tmp_path: Path
) -> None:
    server = serve("-m", model("Q4_K"), cache_mib=2)
    assert server.text(PROMPTS[0]) == stock_texts[0]
    watched = _page(server)
    watched.control(trace=os.fsencode(tmp_path / "trace"))
    assert server.text(PROMPTS[3]) == stock_texts[3]
    watched.control(trace=b"")
    assert server.text(PROMPTS[1]) == stock_texts[1]
    assert watched.read().figures.trace_state == 0
    recorded = trace.read(tmp_path / "trace")
    assert (recorded.used, recorded.experts, recorded.layers) == (3, 8, 2)
    evaluations = recorded.evaluations()
    # The prompt, then its tokens one by one.
    assert evaluations["tokens"][0] > 10
    assert evaluations["tokens"][1:].tolist() == [1] * (len(evaluations) - 1)
    assert np.diff(evaluations["evaluation"]).tolist() == [1] * (len(evaluations) - 1)
    assert np.diff(evaluations["ms"].astype(int)).min() >= 0
    # Where none can be made the answer is the same, and the page says why.
    watched.control(trace=b"/proc/none")
    assert server.text(PROMPTS[2]) == stock_texts[2]
    assert watched.read().figures.trace_state == 2
    assert len(server.said("moetuner: no router trace: cannot record to /proc/none")) == 1
    assert server.stop() == 0


@pytest.mark.parametrize("name", ["Q4_K", "gpt-oss", "hy_v3", "many"])
def test_the_trace_is_what_the_router_chose(
    engine: Engine, model: Model, tmp_path: Path, name: str
) -> None:
    """An evaluation callback in stock llama.cpp sees the router's choice: it is the same, and
    so are the traces for every size of cache and number of threads."""
    batches = ["33", "1", "1", "7", "1"]

    def run(output: Path, threads: int, experts: str, environment: dict[str, str]) -> list[str]:
        command: list[str | Path] = [
            engine.router,
            model(name),
            output,
            str(threads),
            experts,
            *batches,
        ]
        result = run_program(command, environment)
        assert result.returncode == 0, result.log
        return output.read_text().splitlines()

    wanted = run(tmp_path / "stock", 2, "-", {})
    layers = {int(line.split()[1]) for line in wanted}
    first = [line for line in wanted if line.split()[1] == str(min(layers))]
    assert len(first) == sum(map(int, batches))
    for index, (threads, io) in enumerate([(1, "uring"), (2, "pool"), (3, "uring")]):
        file = tmp_path / f"trace-{index}"
        environment = engine.environment(cache_mib=(2, 3, 64)[index], io=io, trace=file)
        seen = run(tmp_path / "seen", threads, BUFFER_TYPE, environment)
        assert seen == wanted
        recorded = trace.read(file)
        assert recorded.layers == len(layers)
        lines = [
            f"{row[0]} {row[1]} {row[3]} {row[4]} " + " ".join(map(str, row[5:]))
            for row in _plain(recorded.rows)
        ]
        assert lines == wanted
        assert recorded.cut == 0


def test_a_full_disk_ends_the_trace_and_nothing_else(
    engine: Engine, model: Model, tmp_path: Path
) -> None:
    """The limit on file size stands for it."""
    command: list[str | Path] = [engine.llama.completion, "-m", model("Q4_K"), "-t", "1"]
    command += ["-p", "under the river", "-n", "150", "--temp", "0", "-no-cnv", "--no-repack"]
    command += ["--no-perf", "--no-warmup"]
    limited: list[str | Path] = ["prlimit", "--fsize=6000", *command]
    stock = run_program(command, stderr=subprocess.DEVNULL)
    environment = engine.environment(cache_mib=2, trace=tmp_path / "trace")
    ours = run_program([*limited, *OVERRIDE], environment, stderr=subprocess.DEVNULL)
    assert (ours.returncode, ours.log) == (stock.returncode, stock.log)
    recorded = trace.read(tmp_path / "trace")
    assert (len(recorded.rows), recorded.cut) == ((6000 - 1024) // 22, 0)
    environment = engine.environment(cache_mib=2, trace=tmp_path / "trace2")
    told = run_program([*limited, *OVERRIDE], environment)
    assert len(told.lines("moetuner: the router trace ends here: cannot write")) == 1


def test_two_models_have_a_page_and_a_trace_each(
    model: Model, serve: Serve, tmp_path: Path
) -> None:
    server = serve(
        "-m", model("Q4_K"), "-md", model("Q8_0"), "--spec-type", "draft-simple",
        cache_mib=2, trace=tmp_path / "trace",
    )  # fmt: skip
    server.text(PROMPTS[2])
    found = {watched.read().identity.model for watched in _pages(server.pid)}
    assert found == {str(model("Q4_K")), str(model("Q8_0"))}
    assert server.stop() == 0
    traces = {trace.read(path).model for path in sorted(tmp_path.glob("trace*"))}
    assert traces == found


def test_the_page_goes_with_the_model_and_the_process(model: Model, serve: Serve) -> None:
    server = serve("-m", model("Q4_K"), "--sleep-idle-seconds", "1", cache_mib=2)
    server.text(PROMPTS[0])
    watched = _page(server)
    deadline = time.monotonic() + LIMIT_S
    while _pages(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(NotSo, match="gone"):
        watched.read()
    server.text(PROMPTS[1])
    assert _page(server).read().figures.state == 1
    assert server.stop() == 0
    assert _pages(server.pid) == []


def test_a_server_that_is_killed_leaves_nothing_but_whole_rows(
    model: Model, serve: Serve, tmp_path: Path
) -> None:
    server = serve("-m", model("Q4_K"), cache_mib=2, trace=tmp_path / "trace")
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                server.text(PROMPTS[2])
            except OSError:
                return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "trace").exists() or (tmp_path / "trace").stat().st_size < 4096:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        watched = _page(server)
        held = os.open(watched.file, os.O_RDONLY)
        server.kill()
    finally:
        stop.set()
        asking.join()
    assert _pages(server.pid) == []
    with pytest.raises(NotSo, match="gone"):
        watched.read()
    with pytest.raises(NotSo, match="gone"):
        watched.control(depth=1)
    # Who had it open still reads it, or learns that the writer died in the middle.
    try:
        assert engines.read(held, patience_s=0.1).figures.tokens > 0
    except NotSo as error:
        assert "middle of an update" in str(error)
    os.close(held)
    recorded = trace.read(tmp_path / "trace")
    assert len(recorded.rows) > 100


def test_without_a_page(model: Model, serve: Serve, stock_texts: list[str]) -> None:
    server = serve("-m", model("Q4_K"), cache_mib=2, page=0)
    assert server.text(PROMPTS[0]) == stock_texts[0]
    assert _pages(server.pid) == []
    assert server.stop() == 0


def test_bad_values_are_refused(engine: Engine, model: Model) -> None:
    command: list[str | Path] = [engine.llama.bench, "-m", model("Q8_0"), "-p", "4", "-n", "1"]
    result = run_program([*command, "-r", "1", "-t", "2"], engine.environment(page="yes"))
    assert result.lines("moetuner: MOETUNER_PAGE=yes: it takes 1 or 0: not used"), result.log
