"""The one accessor: errors that name path, value and reason; files of our own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moetuner.board.sysroot import Missing, SysRoot
from moetuner.errors import SystemRefused


@pytest.fixture
def root(tmp_path: Path) -> SysRoot:
    return SysRoot(tmp_path)


def test_paths_stay_below_the_root(root: SysRoot, tmp_path: Path) -> None:
    assert root.path("/sys/x") == tmp_path / "sys/x"
    assert root.path("sys/x") == tmp_path / "sys/x"


@pytest.mark.parametrize("text", ["gpu\0", " gpu\n", "gpu\n\0", "gpu"])
def test_text_without_its_ending(root: SysRoot, tmp_path: Path, text: str) -> None:
    (tmp_path / "name").write_text(text)
    assert root.read("/name") == "gpu"


def test_missing(root: SysRoot, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="No such file or directory") as caught:
        root.read("/a")
    assert str(tmp_path / "a") in caught.value.message
    with pytest.raises(Missing):
        root.write("/a", "1")
    assert not (tmp_path / "a").exists()
    assert root.read_optional("/a") is None
    assert root.read_int_optional("/a") is None
    assert root.children("/a") == []


@pytest.mark.parametrize("gone", [errno.ENODEV, errno.ENXIO, errno.ENOENT])
@pytest.mark.parametrize("refused", [errno.EIO, errno.EACCES, errno.EAGAIN, errno.EINVAL])
def test_gone_or_refused(
    root: SysRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int, refused: int
) -> None:
    (tmp_path / "a").write_text("0")
    for error, missing in ((gone, True), (refused, False)):

        def fail(fd: int, data: bytes, error: int = error) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(SystemRefused) as caught:
            root.write("/a", "1020000000")
        assert isinstance(caught.value, Missing) is missing
        assert f"cannot write 1020000000 to {tmp_path}/a: {os.strerror(error)}" == str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("-5", -5), (" 7 ", 7)])
def test_numbers(root: SysRoot, tmp_path: Path, text: str, value: int) -> None:
    (tmp_path / "n").write_text(text)
    assert root.read_int("/n") == value


@pytest.mark.parametrize("text", ["", "<none>", "1.5", "12 13", "x" * 1000])
def test_no_numbers(root: SysRoot, tmp_path: Path, text: str) -> None:
    (tmp_path / "n").write_text(text)
    with pytest.raises(SystemRefused, match="not a whole number") as caught:
        root.read_int("/n")
    assert len(caught.value.message) < 200 + len(str(tmp_path))
    assert root.read_int_optional("/n") is None


def test_replace_makes_the_directory_and_writes_all(root: SysRoot, tmp_path: Path) -> None:
    text = "x" * 100_000
    root.replace("/run/moetuner/status.json", text)
    assert (tmp_path / "run/moetuner/status.json").read_text() == text
    root.replace("/run/moetuner/status.json", "shorter")
    assert root.read_state("/run/moetuner/status.json", 100) == "shorter"
    assert [p.name for p in (tmp_path / "run/moetuner").iterdir()] == ["status.json"]


def test_replace_in_small_pieces(root: SysRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    root.replace("/a", "0123456789")
    assert root.read("/a") == "0123456789"


def test_replace_is_synced_before_it_is_renamed(
    root: SysRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for owner, name in ((os, "fsync"), (Path, "rename")):
        real = getattr(owner, name)

        def call(*args: object, name: str = name, real: object = real, **kwargs: object) -> object:
            order.append(name)
            return real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, call)
    root.replace("/a", "x")
    assert order == ["fsync", "rename", "fsync"]


def test_remove(root: SysRoot, tmp_path: Path) -> None:
    root.remove("/no/such/file")
    root.replace("/a", "x")
    root.remove("/a")
    root.remove("/a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "d").mkdir()
    with pytest.raises(SystemRefused, match="cannot remove"):
        root.remove("/d")
