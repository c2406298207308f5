"""The plugin with AddressSanitizer and UndefinedBehaviorSanitizer inside stock programs.

A report ends the program with an error, so each test is that all is well. ThreadSanitizer
has only the core (test_core.py): OpenMP's barriers in ggml are unknown to it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.conftest import MODELS
from tests.engine.faultfs import Faults, serve
from tests.engine.lora import write_lora
from tests.engine.rig import Engine, Logits, build_sanitized
from tests.engine.servers import PROMPTS, Start

Model = Callable[[str], Path]


@pytest.fixture(scope="session")
def sanitized(engine: Engine) -> Engine:
    return build_sanitized(engine)


@pytest.fixture(scope="session")
def checked(logits: Logits, sanitized: Engine) -> Logits:
    """Logits of the sanitized plugin; stock's are those that are known already."""
    return replace(logits, engine=sanitized)


def test_the_sanitizer_is_there(checked: Logits, sanitized: Engine, model: Model) -> None:
    symbols = subprocess.run(
        ["nm", "-D", str(sanitized.plugin.path)], capture_output=True, text=True, check=True
    )
    assert "__asan_report_load" in symbols.stdout
    assert "__ubsan_handle" in symbols.stdout
    environment = {**sanitized.environment(), "ASAN_OPTIONS": "verbosity=1"}
    assert checked.run([model("Q8_0")], (), environment).lines("AddressSanitizer Init done")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache_mib", [1, 64])
@pytest.mark.parametrize("name", ["F16", "gpt-oss", "hy_v3", "mixed", "grovemoe", "no-gate"])
def test_logits(checked: Logits, model: Model, name: str, cache_mib: int, threads: int) -> None:
    arguments = ["--batches", "1,2,31,64", "--threads", threads]
    checked.assert_equal([model(name)], arguments, cache_mib=cache_mib)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--load-mode", "none", "--check-tensors", "--rounds", 3),
        ("--load-mode", "dio", "--node-by-node"),
        ("--load-mode", "mmap+mlock"),
    ],
    ids=["none", "dio", "mlock"],
)
def test_loading(checked: Logits, model: Model, arguments: tuple[object, ...]) -> None:
    checked.assert_equal([model("gpt-oss")], arguments, stock=(), cache_mib=1)


@pytest.mark.parametrize("how", [("--share", "--parallel"), ("--parallel",), ()])
def test_several_contexts(checked: Logits, model: Model, how: tuple[str, ...]) -> None:
    checked.assert_equal([model("Q8_0")] * 3, ["--batches", "2,64", *how], cache_mib=1)


def test_adapter(checked: Logits, model: Model, tmp_path: Path) -> None:
    adapter = write_lora(MODELS["Q8_0"], tmp_path / "adapter.gguf")
    checked.assert_equal([model("Q8_0")], ["--lora", adapter], cache_mib=2)


def test_hot_list(checked: Logits, model: Model, tmp_path: Path) -> None:
    for _ in range(2):
        checked.assert_equal([model("Q8_0")], cache_mib=2, hot_list=tmp_path / "hot")


@pytest.mark.parametrize("value", ["0", "-1", "x", "9" * 30])
def test_bad_values(checked: Logits, model: Model, value: str) -> None:
    environment = checked.engine.environment(cache_mib=value)
    result = checked.run([model("Q8_0")], (), environment)
    assert result.returncode == 1
    assert result.lines(f"moetuner: MOETUNER_CACHE_MIB={value}: it takes"), result.log
    assert not result.lines("Sanitizer"), result.log


@pytest.mark.root
@pytest.mark.parametrize("io", ["uring", "pool"])
def test_a_disk_that_fails(checked: Logits, model: Model, tmp_path: Path, io: str) -> None:
    original = model("Q8_0")
    arguments = ["--batches", "64,8", "--decode", 16]
    environment = checked.engine.environment(cache_mib=1, io=io)
    with serve(original, tmp_path, Faults(errors=150, delay_ms=3)) as disk:
        checked.assert_equal([disk.path], arguments, originals=[original], cache_mib=1, io=io)
        disk.set(Faults(after=100, bad=(original.stat().st_size // 2, original.stat().st_size)))
        result = checked.run([disk.path], arguments, environment)
    assert result.returncode == 1
    assert result.lines("moetuner_logits: llama_decode gave -"), result.log
    assert not result.lines("Sanitizer"), result.log


def test_server(sanitized: Engine, model: Model, start: Start, stock_texts: list[str]) -> None:
    server = start("-m", model("Q4_K"), "-np", "2", env=sanitized.environment(cache_mib=2))
    assert [server.text(prompt) for prompt in PROMPTS[::4]] == stock_texts[::4]
    assert server.stop() == 0
    assert not server.said("Sanitizer")
