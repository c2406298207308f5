"""Fixtures: what is built once, a watcher that runs on through many tests, processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bpf.harness import Driver, Rig
from tests.bpf.natives import Natives, copy

Start = Callable[..., Driver]


@pytest.fixture(scope="session")
def natives(tmp_path_factory: pytest.TempPathFactory) -> Natives:
    return Natives(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session", params=["sites", "uretprobe"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A watcher for each way to probe returns. It runs on from test to test, as a daemon
    does: a test uses processes, and mostly files, of its own."""
    with Rig(request.param) as rig:
        yield rig


@pytest.fixture
def start(natives: Natives) -> Iterator[Start]:
    """`start()` runs the driver, `start(path)` another program that obeys lines."""
    drivers: list[Driver] = []

    def run(*command: str | bytes | Path) -> Driver:
        drivers.append(Driver(command or (natives.driver,)))
        return drivers[-1]

    yield run
    for driver in drivers:
        driver.close()


@pytest.fixture(scope="session")
def library(rig: Rig, natives: Natives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain library, in a file that is the rig's own."""
    path = tmp_path_factory.mktemp("library") / "libllama.so"
    copy(natives.library(), path)
    return path


@pytest.fixture
def driver(rig: Rig, start: Start, library: Path) -> Driver:
    """A process that has loaded `library`, which `rig` watches."""
    driver = start()
    driver.load(library)
    rig.attached(library)
    return driver


@pytest.fixture
def small(natives: Natives, tmp_path: Path) -> Path:
    """A library with one function, in a file of the test's own."""
    path = tmp_path / "libllama.so"
    copy(natives.small(), path)
    return path
