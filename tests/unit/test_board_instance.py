"""One daemon a board, and who counts as running.

./run-tests unit -k instance
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetuner.board.instance import PATH, alive, nobody_alive, only_one
from moetuner.board.sysroot import SysRoot
from moetuner.errors import NotSo, SystemRefused


@pytest.fixture
def root(tmp_path: Path) -> SysRoot:
    return SysRoot(tmp_path)


@pytest.fixture
def held(root: SysRoot) -> Iterator[Path]:
    """The lock file, held by somebody (as flock sees it) whatever stands in it."""
    path = root.path(PATH)
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def test_a_second_is_told_who_runs(root: SysRoot) -> None:
    with only_one(root):
        assert root.path(PATH).read_text() == f"{os.getpid()}\n"
        for attempt in (only_one, nobody_alive):
            with pytest.raises(NotSo, match=rf"is running \(pid {os.getpid()}\)"), attempt(root):
                pass
    with only_one(root), pytest.raises(NotSo), only_one(root):
        pass


def test_a_holder_that_was_killed_is_as_good_as_gone(root: SysRoot, held: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    held.write_text(f"{ended.pid}\n")
    assert not alive(ended.pid)
    with nobody_alive(root):
        pass
    with pytest.raises(NotSo), only_one(root, wait_s=0.1):  # its probes are still there
        pass


@pytest.mark.parametrize("text", ["", "nonsense", "-1"])
def test_a_holder_that_is_not_known_is_taken_to_live(root: SysRoot, held: Path, text: str) -> None:
    """A full /run keeps it from writing down who it is; it runs all the same."""
    held.write_text(text)
    for attempt in (only_one, nobody_alive):
        with pytest.raises(NotSo, match=r"is running \(pid unknown\)"), attempt(root):
            pass


def test_a_link_in_its_place_is_refused(root: SysRoot, tmp_path: Path) -> None:
    target = tmp_path / "target"
    root.path(PATH).parent.mkdir(parents=True)
    root.path(PATH).symlink_to(target)
    with pytest.raises(SystemRefused, match="symbolic links"), only_one(root):
        pass
    assert not target.exists()
