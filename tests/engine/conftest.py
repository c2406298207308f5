"""Fixtures of the backend's tests: what is built, and small models of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import LlamaBuild, cache_directory
from moetuner.demo.model import ModelSpec, ensure
from moetuner.serve.build import OVERRIDE
from tests.engine import rig
from tests.engine.families import FAMILIES, ensure_family
from tests.engine.rig import Engine
from tests.engine.servers import PROMPTS, Server, Start


def _spec(**values: object) -> ModelSpec:
    """Two layers of 8 experts, 3 of them used; feed_forward makes an expert about 0.4 MiB."""
    chosen = {"layers": 2, "experts_used": 3, **values}
    return ModelSpec(**chosen)  # type: ignore[arg-type]


MODELS = {
    "F16": _spec(expert_type="F16", feed_forward=256),
    "Q8_0": _spec(expert_type="Q8_0"),
    "Q4_0": _spec(expert_type="Q4_0", feed_forward=1024),
    "Q4_K": _spec(expert_type="Q4_K", feed_forward=1024),
    "Q5_K": _spec(expert_type="Q5_K", feed_forward=768),
    # A slice is 39.4 pages.
    "Q6_K": _spec(expert_type="Q6_K", feed_forward=768),
    "IQ4_NL": _spec(expert_type="IQ4_NL", feed_forward=1024),
    "IQ4_XS": _spec(expert_type="IQ4_XS", feed_forward=1024),
    "MXFP4": _spec(expert_type="MXFP4", feed_forward=1024),
    "mixed": _spec(expert_type="Q4_K", down_type="Q6_K", feed_forward=768),
    # Biases, its own activation; a slice is 10.8 pages.
    "gpt-oss": _spec(family="gpt-oss", expert_type="MXFP4", embedding=288, feed_forward=288),
    # A slice is 23.4 pages.
    "olmoe": _spec(family="olmoe", heads_kv=4, feed_forward=352),
    # gate_up in one matrix, a shared expert, the first layer dense.
    "hy_v3": _spec(family="hy_v3", layers=3, expert_type="Q4_K", feed_forward=768),
    "many": _spec(experts=64, experts_used=8, expert_type="Q4_K", feed_forward=256),
}


@pytest.fixture(scope="session")
def engine(llama: LlamaBuild) -> rig.Engine:
    return rig.build(llama)


@pytest.fixture(scope="session")
def logits(engine: rig.Engine, tmp_path_factory: pytest.TempPathFactory) -> rig.Logits:
    return rig.Logits(engine, tmp_path_factory.mktemp("logits"))


@pytest.fixture(scope="session")
def model() -> Callable[[str], Path]:
    """`model("Q4_K")` is the file of that one of MODELS or FAMILIES."""

    def find(name: str) -> Path:
        if name in FAMILIES:
            return ensure_family(name, cache_directory() / "models")
        return ensure(MODELS[name], cache_directory() / "models")

    return find


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Iterator[Start]:
    """`start("-m", model, …, env=…)`: ready. With `env` experts go through the plugin."""
    running: list[Server] = []

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Server:
        command: list[str | Path] = [engine.llama.server, "--no-repack", "-t", "2"]
        command += ["-c", "2048", "--log-verbosity", "4", *arguments]
        command += OVERRIDE if env is not None else ()
        server = Server(command, tmp_path / f"server-{len(running)}.log", env or {})
        running.append(server)
        server.await_ready()
        return server

    yield run
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def stock_texts(
    engine: Engine, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Stock's answers to PROMPTS."""
    log = tmp_path_factory.mktemp("stock") / "server.log"
    command: list[str | Path] = [engine.llama.server, "-m", model("Q4_K")]
    server = Server([*command, "--no-repack", "-t", "2", "-c", "2048"], log, {})
    try:
        server.await_ready()
        texts = [server.text(prompt) for prompt in PROMPTS]
    finally:
        server.stop()
    assert len(set(texts)) == len(texts)
    return texts
