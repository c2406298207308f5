"""Fixtures: a board, the daemon on it, llama-servers and small programs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import LlamaBuild
from tests.bpf.harness import Driver
from tests.bpf.natives import Natives, copy
from tests.daemon.harness import Dismissed, LlamaCopy, Servers, Stage
from tests.support import devfreqfs
from tests.support.boards import ORIN_NANO_JP6


@pytest.fixture(scope="session")
def dismissed() -> Iterator[Dismissed]:
    dismissed = Dismissed()
    yield dismissed
    dismissed.close()


@pytest.fixture(scope="session")
def make_stage(
    dismissed: Dismissed, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], AbstractContextManager[Stage]]:
    """An Orin Nano, idle, below a directory, and daemons on request. Only programs of this
    test run count."""
    ours = tmp_path_factory.getbasetemp().resolve()

    @contextmanager
    def make(directory: Path) -> Iterator[Stage]:
        with devfreqfs.mount(ORIN_NANO_JP6, directory / "board") as board:
            stage = Stage(board, directory, ours, dismissed)
            yield stage
            stage.close()

    return make


@pytest.fixture
def stage(
    tmp_path: Path, make_stage: Callable[[Path], AbstractContextManager[Stage]]
) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


@pytest.fixture(scope="session")
def llama_copy(llama: LlamaBuild, tmp_path_factory: pytest.TempPathFactory) -> LlamaCopy:
    return LlamaCopy(llama, tmp_path_factory.mktemp("llama") / "bin")


@pytest.fixture
def servers(llama_copy: LlamaCopy, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(llama_copy, tmp_path)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def natives(tmp_path_factory: pytest.TempPathFactory) -> Natives:
    return Natives(tmp_path_factory.mktemp("native"))


@pytest.fixture
def library(natives: Natives, tmp_path: Path) -> Path:
    """A small library that exports llama.cpp's functions, in a file of the test's own."""
    path = tmp_path / "libllama.so"
    copy(natives.library(), path)
    return path


@pytest.fixture
def caller(natives: Natives, library: Path) -> Iterator[Callable[..., Driver]]:
    """`caller("--cpu-moe")` runs a small program that has loaded the library and calls it
    when told; see tests/bpf/native/driver.cpp."""
    drivers: list[Driver] = []

    def run(*arguments: str, program: Path = natives.driver, load: bool = True) -> Driver:
        driver = Driver([program, *arguments])
        drivers.append(driver)
        if load:
            driver.load(library)
        return driver

    yield run
    for driver in drivers:
        driver.close()
