"""The saved min_freq: whatever ends the daemon, at whatever step, min_freq comes back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetuner.board.baseline import PATH, BaselineFile, Outcome, recover
from moetuner.board.sysroot import SysRoot, Untrusted
from moetuner.errors import SystemRefused
from tests.support.boards import MHZ, ORIN_NANO_JP6
from tests.support.devfreqfs import BoardTree, TreeRoot
from tests.support.floor_rig import Rig, killed_at

NODE = "17000000.gpu"


@pytest.fixture
def tree() -> BoardTree:
    return BoardTree(ORIN_NANO_JP6)


@pytest.fixture
def root(tree: BoardTree, tmp_path: Path) -> TreeRoot:
    ORIN_NANO_JP6.write(tmp_path, sys=False)
    return TreeRoot(tree, tmp_path)


@pytest.fixture
def file(root: TreeRoot) -> BaselineFile:
    return BaselineFile(root)


def save(file: BaselineFile, found: float = 306, ours: tuple[float, ...] = (1020,)) -> None:
    file.save(NODE, round(found * MHZ), [round(mhz * MHZ) for mhz in ours])


# -- the file ------------------------------------------------------------------------------


def test_round_trip(file: BaselineFile, root: TreeRoot) -> None:
    assert file.load() is None
    save(file, 408, (612, 1020))
    saved = file.load()
    assert saved is not None
    assert saved.node == NODE
    assert saved.found_hz == 408 * MHZ
    assert saved.ours_hz == (612 * MHZ, 1020 * MHZ)
    assert saved.pid == os.getpid()
    assert saved.boot_id == root.read("/proc/sys/kernel/random/boot_id")
    assert [path.name for path in root.path(PATH).parent.iterdir()] == ["baseline.json"]
    file.clear()
    file.clear()
    assert file.load() is None


@contextmanager
def failing(operation: str, error: int) -> Iterator[None]:
    """Each call of it fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path if operation == "rename" else os, operation, refuse)
        yield


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
def test_a_full_run_raises_nothing_and_says_so(tmp_path: Path, operation: str) -> None:
    rig = Rig(tmp_path)
    rig.said()
    with failing(operation, errno.ENOSPC):
        rig.demand()
        rig.advance(10)
    assert rig.written() == []
    [line] = rig.said()
    assert line == f"cannot write {tmp_path}{PATH}: No space left on device"
    rig.demand(False)
    rig.demand()
    assert rig.min_mhz == 1020


def test_a_failed_save_leaves_the_old_one(file: BaselineFile) -> None:
    save(file, 408)
    with failing("fsync", errno.ENOSPC), pytest.raises(SystemRefused):
        save(file, 510)
    saved = file.load()
    assert saved is not None
    assert saved.found_hz == 408 * MHZ


GOOD: dict[str, Any] = {
    "node": NODE, "found_hz": 306 * MHZ, "ours_hz": [1020 * MHZ],
    "boot_id": "5b0f8a52-0c4e-4d6a-9d38-2f1c8a2f9b01", "pid": 7, "version": 1,
}  # fmt: skip
TEXT = json.dumps(GOOD)
HOSTILE = {
    "empty": "",
    "truncated": TEXT[: len(TEXT) // 2],
    "no JSON": "min_freq=306000000\n",
    "not an object": "[1, 2, 3]",
    "nested": "[" * 4000,
    "a huge number": TEXT.replace(str(306 * MHZ), "9" * 3000),
    "infinity": TEXT.replace(str(306 * MHZ), "Infinity"),
    "a fraction": TEXT.replace(str(306 * MHZ), "306000000.5"),
    "a key missing": json.dumps({k: v for k, v in GOOD.items() if k != "boot_id"}),
    "a key more": json.dumps(GOOD | {"extra": 1}),
    "a path for a node": json.dumps(GOOD | {"node": "../../../etc"}),
    "a node that is dots": json.dumps(GOOD | {"node": ".."}),
    "a node that is a number": json.dumps(GOOD | {"node": 17}),
    "found as text": json.dumps(GOOD | {"found_hz": "306000000"}),
    "found as boolean": json.dumps(GOOD | {"found_hz": True}),
    "found negative": json.dumps(GOOD | {"found_hz": -1}),
    "found far too high": json.dumps(GOOD | {"found_hz": 10**12}),
    "ours empty": json.dumps(GOOD | {"ours_hz": []}),
    "ours endless": json.dumps(GOOD | {"ours_hz": list(range(17))}),
    "ours no list": json.dumps(GOOD | {"ours_hz": 1020 * MHZ}),
    "boot id a list": json.dumps(GOOD | {"boot_id": []}),
    "pid as text": json.dumps(GOOD | {"pid": "7"}),
    "another version": json.dumps(GOOD | {"version": 2}),
    "too long": TEXT + " " * 5000,
    "no text": "\x00\xff\xfe",
}


def put(root: SysRoot, text: str, mode: int = 0o644) -> Path:
    path = root.path(PATH)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    path.chmod(mode)
    return path


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_file_is_ignored_said_and_removed(
    file: BaselineFile, root: TreeRoot, tree: BoardTree, text: str
) -> None:
    tree.kernel.write("min_freq", "1020000000")
    path = put(root, text)
    result = recover(root, file)
    assert result.outcome is Outcome.IGNORED
    assert str(path) in result.text
    assert "ignored" in result.text
    assert "\n" not in result.text
    assert tree.kernel.min_hz == 1020 * MHZ
    assert recover(root, file).outcome is Outcome.NOTHING


def test_the_undamaged_file_is_believed(
    file: BaselineFile, root: TreeRoot, tree: BoardTree
) -> None:
    tree.kernel.write("min_freq", "1020000000")
    put(root, TEXT)
    assert recover(root, file).outcome is Outcome.RESTORED


def test_a_link_is_not_followed(file: BaselineFile, root: TreeRoot, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(TEXT)
    path = put(root, "")
    path.unlink()
    path.symlink_to(elsewhere)
    with pytest.raises(Untrusted, match="symbolic link"):
        file.load()
    assert recover(root, file).outcome is Outcome.IGNORED
    assert elsewhere.read_text() == TEXT
    assert not path.is_symlink()


def test_a_link_in_place_of_the_temporary_file_is_not_written_through(
    file: BaselineFile, root: TreeRoot, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    path = put(root, "")
    path.with_name(".baseline.json.new").symlink_to(elsewhere)
    with pytest.raises(SystemRefused):
        save(file)
    assert elsewhere.read_text() == "precious"


def test_a_fifo_does_not_stop_us(file: BaselineFile, root: TreeRoot) -> None:
    path = put(root, "")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Untrusted, match="not a regular file"):
        file.load()


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write(file: BaselineFile, root: TreeRoot, mode: int) -> None:
    put(root, TEXT, mode)
    with pytest.raises(Untrusted, match="writable by others"):
        file.load()


@pytest.mark.root
def test_a_file_of_another_user(file: BaselineFile, root: TreeRoot) -> None:
    os.chown(put(root, TEXT), 4321, 4321)
    with pytest.raises(Untrusted, match="belongs to user 4321"):
        file.load()


# -- putting back --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "ours", "min_mhz", "max_mhz", "outcome", "after"),
    [
        (306, (1020,), 1020, 1020, Outcome.RESTORED, 306),
        (510, (1020,), 1020, 1020, Outcome.RESTORED, 510),
        (612.001, (1020,), 1020, 1020, Outcome.RESTORED, 612.001),
        (306, (612, 1020), 612, 1020, Outcome.RESTORED, 306),
        (306, (1020,), 1020, 612, Outcome.RESTORED, 306),  # shown clamped, ours all the same
        (612, (1020,), 1020, 408, Outcome.RESTORED, 408),  # never above max_freq
        (306, (1020,), 306, 1020, Outcome.ALREADY, 306),  # it ended before the write
        (306, (1020,), 714, 1020, Outcome.FOREIGN, 714),
        (306, (1020,), 306, 612, Outcome.ALREADY, 306),  # nvpmodel
        (510, (1020,), 306, 1020, Outcome.FOREIGN, 306),
        (100, (1020,), 1020, 1020, Outcome.IGNORED, 1020),  # no such board
        (5000, (1020,), 1020, 1020, Outcome.IGNORED, 1020),
    ],
)
def test_recover(
    file: BaselineFile,
    root: TreeRoot,
    tree: BoardTree,
    found: float,
    ours: tuple[float, ...],
    min_mhz: float,
    max_mhz: float,
    outcome: Outcome,
    after: float,
) -> None:
    tree.kernel.write("min_freq", str(min_mhz * MHZ))
    tree.kernel.write("max_freq", str(max_mhz * MHZ))
    save(file, found, ours)
    assert recover(root, file).outcome is outcome
    assert tree.kernel.min_hz == after * MHZ
    before = len(tree.kernel.writes)
    again = recover(root, file)  # twice is as good as once
    assert (again.outcome, again.text) == (Outcome.NOTHING, "")
    assert len(tree.kernel.writes) == before


def test_nothing_of_ours_is_remembered_above_max(
    file: BaselineFile, root: TreeRoot, tree: BoardTree
) -> None:
    tree.kernel.write("min_freq", "1020000000")
    tree.kernel.write("max_freq", "612000000")
    save(file)
    recover(root, file)
    tree.kernel.write("max_freq", "0")
    assert tree.kernel.min_hz == 306 * MHZ


def test_the_sentence(file: BaselineFile, root: TreeRoot, tree: BoardTree) -> None:
    tree.kernel.write("min_freq", "1020000000")
    save(file)
    assert recover(root, file).text == (
        f"floor 306 MHz (left raised by process {os.getpid()}, which ended)"
    )
    tree.kernel.write("min_freq", "714000000")
    save(file)
    assert recover(root, file).text == (
        "min_freq of 17000000.gpu is 714 MHz by somebody else: left alone"
    )


def test_another_boot(file: BaselineFile, root: TreeRoot, tree: BoardTree) -> None:
    save(file)
    tree.kernel.write("min_freq", "1020000000")
    root.path("/proc/sys/kernel/random/boot_id").write_text("another\n")
    result = recover(root, file)
    assert result.outcome is Outcome.IGNORED
    assert "before the last boot" in result.text
    assert tree.kernel.min_hz == 1020 * MHZ
    assert file.load() is None


def test_a_node_that_is_not_there_keeps_the_file(
    file: BaselineFile, root: TreeRoot, tree: BoardTree
) -> None:
    save(file)
    tree.vanish()
    for _ in range(2):
        result = recover(root, file)
        assert result.outcome is Outcome.WAITING
        assert NODE in result.text
    tree.appear()
    tree.kernel.write("min_freq", "1020000000")
    assert recover(root, file).outcome is Outcome.RESTORED


def test_a_write_that_fails_keeps_the_file(
    file: BaselineFile, root: TreeRoot, tree: BoardTree
) -> None:
    save(file)
    tree.kernel.write("min_freq", "1020000000")
    tree.kernel.faults["min_freq"] = errno.EIO
    result = recover(root, file)
    assert result.outcome is Outcome.FAILED
    assert "still raised" in result.text
    assert "Input/output error" in result.text
    tree.kernel.faults.clear()
    assert recover(root, file).outcome is Outcome.RESTORED


def test_a_node_that_cannot_be_put_back_is_not_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.demand()
    rig.tree.kernel.faults["min_freq"] = errno.EIO
    rig.said()
    rig.start()
    rig.look()
    assert rig.actuator.node is None
    [line] = rig.said()
    assert line.startswith("min_freq is still raised: ")
    rig.tree.kernel.faults.clear()
    rig.look()
    assert rig.min_mhz == 306
    assert rig.actuator.node == NODE


# -- ended at any step -----------------------------------------------------------------------


def activity(rig: Rig) -> None:
    """Raised, held lower while max_freq is, raised again, put back."""
    rig.demand()
    rig.others_write("max_freq", 612)
    rig.advance(2)
    rig.others_write("max_freq", 0)
    rig.advance(2)
    rig.demand(False)


def steps(tmp_path: Path, run: Callable[[Rig], None]) -> int:
    rig = Rig(tmp_path / "count")
    with killed_at(-1, rig) as count:
        run(rig)
        return count()


def prepared(directory: Path) -> Rig:
    rig = Rig(directory)
    rig.others_write("min_freq", 408)
    return rig


def test_ended_at_any_step_of_an_activity(tmp_path: Path) -> None:
    total = steps(tmp_path, activity)
    assert total > 30
    for step in range(1, total + 1):
        rig = prepared(tmp_path / str(step))
        with killed_at(step, rig):
            activity(rig)
        assert rig.saved() or rig.min_mhz == 408, f"step {step}"
        rig.start()
        assert rig.min_mhz == 408, f"step {step}"
        assert not rig.saved(), f"step {step}"
        rig.others_write("max_freq", 0)
        assert rig.min_mhz == 408, f"step {step}: remembered above max_freq"


def test_ended_at_any_step_of_the_recovery(tmp_path: Path) -> None:
    rig = prepared(tmp_path / "count")
    rig.demand()
    with killed_at(-1, rig) as count:
        rig.start()
        total = count()
    assert total >= 4
    for step in range(1, total + 1):
        rig = prepared(tmp_path / str(step))
        rig.demand()
        with killed_at(step, rig):
            rig.start()
        assert recover(rig.root, rig.baseline).outcome in (
            Outcome.RESTORED,
            Outcome.ALREADY,
            Outcome.NOTHING,
        )
        assert rig.min_mhz == 408, f"step {step}"
        assert not rig.saved(), f"step {step}"
