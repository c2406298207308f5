"""Attaching is all or nothing, and what is attached is let go."""

from __future__ import annotations

import errno
import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetuner.log import INFO
from moetuner.watch import layout
from moetuner.watch.kernel import UprobePmu
from moetuner.watch.libraries import Libraries, Library
from moetuner.watch.program import Program, load
from tests.bpf.conftest import Start
from tests.bpf.harness import Rig, descriptors
from tests.bpf.natives import Natives, copy

pytestmark = pytest.mark.root


class FaultyPmu:
    """The real one, that refuses its `at`th probe, or all of a kind."""

    def __init__(self, at: int | None = None, *, offsets: frozenset[int] = frozenset()) -> None:
        self._real = UprobePmu.find()
        self._left = at
        self._offsets = offsets
        self.attached: list[int] = []

    def attach(self, path: str, offset: int, program_fd: int, *, on_return: bool) -> int:
        if self._left is not None:
            self._left -= 1
        if self._left == 0 or (offset in self._offsets and not on_return):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = self._real.attach(path, offset, program_fd, on_return=on_return)
        self.attached.append(fd)
        return fd


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    program = load()
    yield program
    program.close()


class Shelf:
    """Libraries alone, with a loop."""

    def __init__(self, program: Program, pmu: FaultyPmu | UprobePmu, returns: str) -> None:
        self.lines: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.libraries = Libraries(
            program,
            pmu,  # type: ignore[arg-type]
            self.selector,
            returns,
            self._log,
            lambda: None,
        )

    def _log(self, message: str, priority: int = INFO) -> None:
        self.lines.append(message)

    def offer(self, path: Path) -> Library:
        identity = self.libraries.offer(path, str(path))
        assert identity is not None
        library = self.libraries.known[identity]
        while library.state == "examining" or library.detaching:
            for key, _ in self.selector.select(10):
                key.data()
        return library

    def close(self) -> None:
        self.libraries.close()
        assert not self.selector.get_map()
        self.selector.close()


PROBES = {"sites": 8, "uretprobe": 8}


@pytest.mark.parametrize("at", [1, 5, 8])  # the first, the first entry, the last
@pytest.mark.parametrize("returns", PROBES)
def test_a_refused_probe_undoes_all(
    program: Program, natives: Natives, start: Start, tmp_path: Path, returns: str, at: int
) -> None:
    path = tmp_path / "libllama.so"
    copy(natives.library(), path)
    before = descriptors()
    pmu = FaultyPmu(at)
    shelf = Shelf(program, pmu, returns)
    library = shelf.offer(path)
    assert library.state == "failed"
    assert library.links == []
    assert shelf.lines == [
        f"not watching {path}: cannot attach probes: {os.strerror(errno.EINVAL)}"
    ]
    assert len(pmu.attached) == at - 1
    driver = start()
    driver.load(path)
    driver.ask("call decode 5")
    assert not program.processes.lookup(driver.pid, layout.ProcessState())
    shelf.close()
    driver.close()
    assert descriptors() == before


@pytest.mark.parametrize("at", [1, 3])
def test_auto_falls_back_to_uretprobes(
    program: Program, natives: Natives, tmp_path: Path, at: int
) -> None:
    path = tmp_path / "libllama.so"
    copy(natives.library(), path)
    shelf = Shelf(program, FaultyPmu(at), "auto")
    library = shelf.offer(path)
    assert (library.state, library.returns) == ("attached", "uretprobe")
    assert os.strerror(errno.EINVAL) in library.why
    assert len(library.links) == PROBES["uretprobe"]
    shelf.close()


def test_sites_that_are_unclear(program: Program, natives: Natives, tmp_path: Path) -> None:
    path = tmp_path / "libllama.so"
    copy(natives.library("shapes.c", strip=True), path)
    for returns, state in {"sites": "failed", "auto": "attached"}.items():
        shelf = Shelf(program, UprobePmu.find(), returns)
        library = shelf.offer(path)
        assert library.state == state
        assert "no symbol" in library.why
        shelf.close()


def test_nothing_stays_open(natives: Natives, start: Start, small: Path) -> None:
    Rig("sites").close()  # what is imported or cached at first use
    before = descriptors()
    for returns in ("sites", "uretprobe"):
        rig = Rig(returns)
        driver = start()
        driver.load(small)
        rig.attached(small)
        driver.ask("call decode 3")
        assert rig.told(driver.pid) == 1
        rig.close()
        assert driver.ask("call decode 3") == "30"
        driver.close()
        assert descriptors() == before


def test_closing_in_the_middle_of_everything(natives: Natives, start: Start, small: Path) -> None:
    """While a file is examined, and another's probes are being removed."""
    before = descriptors()
    rig = Rig("sites")
    driver = start()
    driver.load(small)
    library = rig.attached(small)
    rig.watcher.libraries.set_returns("uretprobe")
    assert (library.state, library.detaching) == ("examining", 1)
    rig.close()
    assert driver.ask("call decode 3") == "30"
    driver.close()
    assert descriptors() == before


def test_the_loop_does_not_wait_for_the_kernel(rig: Rig, start: Start, small: Path) -> None:
    """Removing a probe takes the kernel a tenth of a second; the loop goes on meanwhile."""
    driver = start()
    driver.load(small)
    known = rig.attached(small)
    other = "uretprobe" if rig.config.returns == "sites" else "sites"
    rig.watcher.libraries.set_returns(other)
    assert known.detaching == 1
    assert known.links == []
    rig.watcher.libraries.set_returns(rig.config.returns)
    rig.attached(small)
    assert known.returns == rig.config.returns
    driver.ask("call decode 23")
    assert rig.count(driver.pid) == 23


def test_harmless_to_those_who_call(natives: Natives, start: Start, small: Path) -> None:
    """Probes come and go while four threads call and check every result."""
    rig = Rig("sites")
    driver = start()
    driver.load(small)
    library = rig.attached(small)
    assert driver.ask("forever 4 decode") == "running"
    for turn in range(10):
        rig.watcher.libraries.set_returns("sites" if turn % 2 else "uretprobe")
        rig.until(lambda: library.state == "attached", "attached again")
    rig.close()
    assert driver.process.poll() is None
    assert driver.ask("call decode 23") == "2530"
    driver.kill()
