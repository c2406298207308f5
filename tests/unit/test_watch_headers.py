"""Which kernel headers are taken, on trees as distributions lay them out."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from moetuner.errors import MissingRequirement
from moetuner.watch import headers

RELEASE = "5.15.148-tegra"
ARCH = {"x86_64": "x86", "aarch64": "arm64"}[platform.machine()]
TEGRA = (
    "usr/src/linux-headers-5.15.148-tegra-ubuntu22.04_aarch64"
    "/3rdparty/canonical/linux-jammy/kernel-source"
)


def tree(directory: Path, *, generated: bool = True, common: bool = True) -> None:
    """A header tree; of a split package `generated` is one half and `common` the other."""
    if generated:
        file(directory / "include/generated/autoconf.h")
    if common:
        file(directory / "include/linux/kconfig.h")
        (directory / "arch" / ARCH / "include/asm").mkdir(parents=True)


def file(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def build_link(root: Path, target: Path | str, release: str = RELEASE) -> Path:
    link = root / "lib/modules" / release / "build"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


def running(root: Path) -> None:
    tree(root / "usr/src/linux-headers-1")
    build_link(root, root / "usr/src/linux-headers-1")


def kheaders(root: Path) -> None:
    file(root / "sys/kernel/kheaders.tar.xz")


def tegra(root: Path) -> None:
    tree(root / TEGRA)
    build_link(root, root / TEGRA)


def tegra_with_a_broken_link(root: Path) -> None:
    tree(root / TEGRA)
    build_link(root, "/usr/src/linux-headers-5.15.148-tegra-linux_x86_64/kernel")


def foreign(root: Path) -> None:
    tree(root / "usr/src/linux-headers-6.1.0-57-amd64")


def debian(root: Path, *, link: bool) -> None:
    arch = root / "usr/src/linux-headers-6.1.0-57-amd64"
    common = root / "usr/src/linux-headers-6.1.0-57-common"
    tree(arch, common=False)
    tree(common, generated=False)
    file(arch / "Makefile", f"# made by packaging\ninclude {common}/Makefile\n")
    if link:
        build_link(root, arch)


FOUND: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "running": (running, "running", "lib/modules/5.15.148-tegra/build"),
    "tegra": (tegra, "running", "lib/modules/5.15.148-tegra/build"),
    "tegra, broken link": (tegra_with_a_broken_link, "foreign", TEGRA),
    "foreign": (foreign, "foreign", "usr/src/linux-headers-6.1.0-57-amd64"),
    "split, linked": (
        lambda root: debian(root, link=True),
        "running",
        "lib/modules/5.15.148-tegra/build",
    ),
    "split, foreign": (
        lambda root: debian(root, link=False),
        "foreign",
        "usr/src/linux-headers-6.1.0-57-amd64",
    ),
}


@pytest.mark.parametrize(("lay", "kind", "directory"), FOUND.values(), ids=FOUND)
def test_found(tmp_path: Path, lay: Callable[[Path], None], kind: str, directory: str) -> None:
    lay(tmp_path)
    found = headers.find(tmp_path, RELEASE)
    assert (found.kind, found.directory) == (kind, tmp_path / directory)
    assert str(found.directory) in found.describe()


def test_kheaders_come_before_foreign_ones(tmp_path: Path) -> None:
    kheaders(tmp_path)
    foreign(tmp_path)
    found = headers.find(tmp_path, RELEASE)
    assert (found.kind, found.directory) == ("kheaders", None)
    assert "kheaders" in found.describe()


def test_the_running_kernels_come_first(tmp_path: Path) -> None:
    kheaders(tmp_path)
    running(tmp_path)
    assert headers.find(tmp_path, RELEASE).kind == "running"


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (["5.10.0-1", "6.1.0-57", "6.12.1"], "5.10.0-1"),
        (["6.1.0-57", "5.15.148-tegra", "5.15.0-91"], "5.15.148-tegra"),
        (["6.8.0-40", "6.1.0-57"], "6.1.0-57"),
    ],
)
def test_the_nearest_of_several(tmp_path: Path, installed: list[str], chosen: str) -> None:
    for version in installed:
        tree(tmp_path / f"usr/src/linux-headers-{version}-generic")
    found = headers.find(tmp_path, RELEASE)
    assert found.directory == tmp_path / f"usr/src/linux-headers-{chosen}-generic"


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    tegra_with_a_broken_link(tmp_path)
    text = headers.find(tmp_path, RELEASE).describe()
    assert "lib/modules/5.15.148-tegra/build is a broken link to /usr/src/" in text
    assert "the probe reads no kernel structure" in text


def test_an_incomplete_tree_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib/modules" / RELEASE / "build").mkdir(parents=True)
    foreign(tmp_path)
    assert "not a complete header tree" in headers.find(tmp_path, RELEASE).note


def test_another_architecture_is_passed_over(tmp_path: Path) -> None:
    directory = tmp_path / "usr/src/linux-headers-5.15.148-tegra"
    tree(directory)
    (directory / "arch" / ARCH).rename(directory / "arch" / "sparc")
    foreign(tmp_path)
    assert "6.1.0-57" in str(headers.find(tmp_path, RELEASE).directory)


@pytest.mark.parametrize("broken", [False, True])
def test_none(tmp_path: Path, broken: bool) -> None:
    if broken:
        build_link(tmp_path, "/gone")
    with pytest.raises(MissingRequirement) as caught:
        headers.find(tmp_path, RELEASE)
    assert "no kernel headers found" in caught.value.message
    assert ("broken link to /gone" in caught.value.message) == broken
    assert caught.value.hint == headers.HINT
    assert "linux-headers-$(uname -r)" in headers.HINT and "nvidia-l4t" in headers.HINT


@pytest.mark.parametrize("text", ["", "include\n", "include relative/Makefile\n", "\xff\0"])
def test_half_a_package(tmp_path: Path, text: str) -> None:
    arch = tmp_path / "usr/src/linux-headers-6.1.0-57-amd64"
    tree(arch, common=False)
    file(arch / "Makefile", text)
    with pytest.raises(MissingRequirement):
        headers.find(tmp_path, RELEASE)


def test_merged(tmp_path: Path) -> None:
    """One tree of links; a file of both is the architecture's."""
    debian(tmp_path, link=False)
    found = headers.find(tmp_path, RELEASE)
    assert found.directory and found.common
    file(found.directory / "include/linux/both.h", "arch")
    file(found.common / "include/linux/both.h", "common")
    file(found.common / "scripts/x", "common")
    (found.directory / "dangling").symlink_to("/gone")
    into = headers.merged(found, tmp_path / "merged")
    assert (into / "include/generated/autoconf.h").exists()
    assert (into / "include/linux/kconfig.h").exists()
    assert (into / "include/linux/both.h").read_text() == "arch"
    assert (into / "scripts/x").read_text() == "common"
    assert (into / "arch" / ARCH / "include/asm").is_dir()
    assert os.readlink(into / "scripts") == str(found.common.resolve() / "scripts")
