"""Fetching through the real pip, from a local directory that stands for the index."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from moetuner.demo.sdist import Sdist, download, unpack
from moetuner.errors import MissingRequirement, SystemRefused

FILES = {
    "pyproject.toml": '[build-system]\nrequires = ["not-installed"]\n'
    'build-backend = "not_installed.build"\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: some-thing\nVersion: 1.2\n",
    "vendor/tool/main.c": "int main(void) { return 0; }\n",
    "vendor/tool/docs/long.md": "text\n",
    "vendor/other.c": "\n",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    with tarfile.open(directory / "some_thing-1.2.tar.gz", "w:gz") as tar:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"some_thing-1.2/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("some_thing-1.2/vendor/tool/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def _sdist(index: Path, version: str = "1.2") -> Sdist:
    digest = hashlib.sha256((index / "some_thing-1.2.tar.gz").read_bytes()).hexdigest()
    return Sdist("some-thing", version, digest, "not_installed.build")


def test_it_is_fetched_without_its_build_requirements(index: Path, tmp_path: Path) -> None:
    archive = download(_sdist(index), tmp_path / "cache")
    assert archive.read_bytes() == (index / "some_thing-1.2.tar.gz").read_bytes()
    (index / "some_thing-1.2.tar.gz").rename(index / "gone")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    again = download(Sdist("some-thing", "1.2", digest, "x.y"), tmp_path / "cache")
    assert again == archive  # the second time nothing is asked


def test_another_file_under_the_name_is_refused(index: Path, tmp_path: Path) -> None:
    other = Sdist("some-thing", "1.2", "0" * 64, "not_installed.build")
    with pytest.raises(SystemRefused, match="is not the file this version was tested with"):
        download(other, tmp_path / "cache")
    archive = download(_sdist(index), tmp_path / "cache")
    archive.write_bytes(b"cut off")
    with pytest.raises(SystemRefused, match="damaged"):
        download(_sdist(index), tmp_path / "cache")


def test_an_index_without_it_is_explained(index: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingRequirement) as caught:
        download(_sdist(index, version="9.9"), tmp_path / "cache")
    assert "some-thing 9.9 cannot be fetched" in str(caught.value)
    assert "some_thing-9.9.tar.gz into the cache directory" in str(caught.value)


def test_only_the_wanted_part_is_unpacked(index: Path, tmp_path: Path) -> None:
    target = tmp_path / "source"
    unpack(index / "some_thing-1.2.tar.gz", "vendor/tool", frozenset({"docs"}), target)
    assert [path.relative_to(target).as_posix() for path in target.rglob("*")] == ["main.c"]


def test_an_interrupted_unpacking_is_begun_anew(index: Path, tmp_path: Path) -> None:
    half = tmp_path / "source.part"
    half.mkdir()
    (half / "stale.c").touch()
    unpack(index / "some_thing-1.2.tar.gz", "vendor/tool", frozenset(), tmp_path / "source")
    assert not half.exists()
    assert not (tmp_path / "source/stale.c").exists()


def test_a_part_that_is_not_there_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemRefused, match="has no vendor/none"):
        unpack(index / "some_thing-1.2.tar.gz", "vendor/none", frozenset(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
