"""The programs of llama.cpp with the plugin: what they write is what stock writes."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moetuner.serve.build import OVERRIDE
from tests.engine.rig import Engine, run_program
from tests.engine.servers import PROMPTS, WORDS, Server, Start

Model = Callable[[str], Path]


def _answers(server: Server, prompts: Sequence[str] = PROMPTS) -> list[str]:
    return [server.text(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("arguments", "cache_mib"),
    [
        ((), 2),
        (("--load-mode", "none", "--no-warmup"), 1),
        (("-np", "2", "--check-tensors", "-t", "1"), 64),
    ],
    ids=["mmap", "none", "two slots"],
)
def test_twelve_prompts(
    engine: Engine,
    model: Model,
    start: Start,
    stock_texts: list[str],
    arguments: tuple[str, ...],
    cache_mib: int,
) -> None:
    server = start("-m", model("Q4_K"), *arguments, env=engine.environment(cache_mib=cache_mib))
    assert _answers(server) == stock_texts
    assert server.said("moetuner: expert cache for")
    assert server.stop() == 0


def test_draft_model(engine: Engine, model: Model, start: Start) -> None:
    """A cache for each of the two. The draft's guesses are checked in batches, and those have
    other bits than single tokens: stock drafts too."""
    arguments = ["-m", model("Q4_K"), "-md", model("Q8_0"), "--spec-draft-n-max", "4"]
    arguments += ["--spec-type", "draft-simple"]
    stock = start(*arguments)
    expected = _answers(stock)
    assert stock.said("draft acceptance")
    assert stock.stop() == 0
    server = start(*arguments, env=engine.environment(cache_mib=2))
    assert _answers(server) == expected
    assert server.said("draft acceptance")
    assert len(server.said("moetuner: expert cache for")) == 2
    assert server.stop() == 0


def test_parallel_requests(engine: Engine, model: Model, start: Start) -> None:
    """Which tokens share a batch is chance, in stock too: so it is only that all end well."""
    server = start("-m", model("Q4_K"), "-np", "3", env=engine.environment(cache_mib=1))
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(server.text, PROMPTS))
    assert all(texts)
    assert not server.said("moetuner: cannot")
    assert server.stop() == 0


def test_sleep_and_wake(engine: Engine, model: Model, start: Start, stock_texts: list[str]) -> None:
    """The model is unloaded while nobody asks, and its files and threads go with it."""
    arguments = ["-m", model("Q4_K"), "--sleep-idle-seconds", "1"]
    server = start(*arguments, env=engine.environment(cache_mib=2))
    asleep = []
    for round_ in range(2):
        assert server.text(PROMPTS[round_]) == stock_texts[round_]
        awake = server.open_files()
        deadline = time.monotonic() + 30
        while len(server.said("entering sleeping state", "handle_sleep")) <= round_:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while server.open_files() >= awake:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        asleep.append(server.open_files())
    assert asleep[0] == asleep[1]
    assert server.text(PROMPTS[2]) == stock_texts[2]
    assert server.stop() == 0


def test_router(
    engine: Engine, model: Model, start: Start, stock_texts: list[str], tmp_path: Path
) -> None:
    """Its children have the plugin from the environment and the pattern from its command."""
    models = tmp_path / "models"
    models.mkdir()
    for name in ("Q4_K", "Q8_0"):
        (models / f"{name}.gguf").symlink_to(model(name))
    server = start("--models-dir", models, env=engine.environment(cache_mib=2))
    assert [server.text(prompt, model="Q4_K") for prompt in PROMPTS[:2]] == stock_texts[:2]
    assert server.text(PROMPTS[0], model="Q8_0") != stock_texts[0]
    assert server.text(PROMPTS[2], model="Q4_K") == stock_texts[2]
    assert len(server.said("moetuner: expert cache for")) == 2
    assert server.stop() == 0


def test_file_cut_off_under_the_server(
    engine: Engine, model: Model, start: Start, stock_texts: list[str], tmp_path: Path
) -> None:
    """A request fails and says so; the server lives, and goes on when the bytes are back."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(model("Q4_K"), path)
    whole = path.read_bytes()
    server = start("-m", path, "--no-warmup", env=engine.environment(cache_mib=1))
    assert server.text(PROMPTS[0]) == stock_texts[0]
    # What is left holds all of layer 0 and of the dense weights that lie before it.
    os.truncate(path, len(whole) * 3 // 4)
    with pytest.raises(urllib.error.HTTPError) as failure:
        server.text(PROMPTS[11])
    assert failure.value.code == 500
    assert server.said("moetuner: cannot read", str(path), "the file ends there")
    with path.open("r+b") as file:
        file.write(whole)
    assert server.text(PROMPTS[11]) == stock_texts[11]
    assert server.stop() == 0


def test_perplexity(engine: Engine, model: Model, tmp_path: Path) -> None:
    source = random.Random(7)
    text = tmp_path / "text"
    text.write_text(" ".join(source.choice(WORDS) for _ in range(400)))
    command: list[str | Path] = [engine.llama.perplexity, "-m", model("mixed"), "-f", text]
    command += ["-c", "128", "-b", "256", "--chunks", "3", "-t", "2", "--no-repack"]
    stock = _perplexities(command, {})
    ours = _perplexities([*command, *OVERRIDE], engine.environment(cache_mib=2))
    assert ours == stock
    assert len(stock) == 4


def _perplexities(command: Sequence[str | Path], environment: Mapping[str, str]) -> list[str]:
    """What it prints: that of each chunk and the last. Stock drops the end of its log at exit in
    one of 20 runs (with status 0), so such a run is repeated."""
    for _ in range(10):
        run = run_program(command, environment)
        assert run.returncode == 0, run.log
        if "PPL = " in run.log:
            break
    return re.findall(r"\[\d\]\d+\.\d+|PPL = .*", run.log)


@pytest.mark.parametrize("pattern", [(), OVERRIDE], ids=["variable alone", "pattern"])
def test_bench(engine: Engine, model: Model, pattern: tuple[str, ...]) -> None:
    command: list[str | Path] = [engine.llama.bench, "-m", model("Q4_K"), "-v", "-t", "1,2"]
    command += ["--repack", "0", "-p", "40", "-n", "4", "-r", "2", *pattern]
    result = run_program(command, engine.environment(cache_mib=2))
    assert result.returncode == 0
    assert result.lines("moetuner: expert cache for")
    assert len(result.lines("| MOETUNER", "tg4")) == 2


def test_completion(engine: Engine, model: Model) -> None:
    command: list[str | Path] = [engine.llama.completion, "-m", model("Q4_K"), "-t", "1"]
    command += ["-p", "under the river", "-n", "24", "--temp", "0", "-no-cnv", "--no-repack"]
    command += ["--log-verbosity", "0", "--no-perf"]
    stock = run_program(command, stderr=subprocess.DEVNULL)
    ours = run_program(
        [*command, *OVERRIDE], engine.environment(cache_mib=2), stderr=subprocess.DEVNULL
    )
    assert (ours.returncode, ours.log) == (stock.returncode, stock.log)
    assert stock.returncode == 0
    assert stock.log.startswith("under the river") and len(stock.log.split()) > 8
