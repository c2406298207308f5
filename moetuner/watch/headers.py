"""Kernel headers for bcc: the running kernel's, else kheaders, else any installed ones.

The probe reads no kernel structure, so the headers of another kernel compile the same
program; they only have to be of this architecture. bcc takes a directory through
BCC_KERNEL_SOURCE, and it must hold everything: Debian splits its headers into an
architecture and a common package, which `merged` joins as links in a directory.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from moetuner.errors import MissingRequirement

HINT = (
    "install kernel headers: apt-get install linux-headers-$(uname -r), on a Jetson "
    "nvidia-l4t-kernel-headers; if the running kernel has no package any headers of this "
    "architecture will do (Debian: linux-headers-amd64 or -arm64, Ubuntu: linux-headers-generic)"
)
_ARCH = {"x86_64": "x86", "aarch64": "arm64"}
_MARK = Path("include/linux/kconfig.h")  # bcc includes it first
_GENERATED = Path("include/generated/autoconf.h")


@dataclass(frozen=True)
class Headers:
    """What bcc will compile against.

    kind: "running" (its own place), "kheaders" (inside the kernel), "foreign" (another
    kernel's). `directory` is None where bcc finds them by itself; `common` is the second
    half of a split package; `note` names a broken link that was passed over.
    """

    kind: str
    directory: Path | None
    common: Path | None = None
    note: str = ""

    def describe(self) -> str:
        if self.kind == "kheaders":
            text = "the headers inside the kernel (kheaders)"
        elif self.kind == "running":
            text = f"the running kernel's headers, {self.directory}"
        else:
            text = (
                f"another kernel's headers, {self.directory} (safe: the probe reads no kernel "
                "structure)"
            )
        return f"{text}; {self.note}" if self.note else text


def find(root: Path = Path("/"), release: str | None = None) -> Headers:
    """The headers to use. MissingRequirement names what was looked at, and the package."""
    release = release or platform.release()
    build = root / "lib/modules" / release / "build"
    note = ""
    if build.is_symlink() and not build.exists():
        note = f"{build} is a broken link to {os.readlink(build)}"
    elif build.is_dir():
        own = _complete("running", build)
        if own:
            return own
        note = f"{build} is not a complete header tree"
    if (root / "sys/kernel/kheaders.tar.xz").exists():
        return Headers("kheaders", None, note=note)
    for candidate in _installed(root, release):
        found = _complete("foreign", candidate)
        if found:
            return Headers("foreign", found.directory, found.common, note)
    looked = f"; {note}" if note else ""
    raise MissingRequirement(f"no kernel headers found{looked}", HINT)


def _complete(kind: str, directory: Path) -> Headers | None:
    arch = _ARCH.get(platform.machine(), platform.machine())
    if not (directory / _GENERATED).exists():
        return None
    if (directory / _MARK).exists() and (directory / "arch" / arch / "include/asm").is_dir():
        return Headers(kind, directory)
    common = _common_half(directory)
    if common and (common / _MARK).exists() and (common / "arch" / arch / "include/asm").is_dir():
        return Headers(kind, directory, common)
    return None


def _common_half(directory: Path) -> Path | None:
    """The tree that a split package's Makefile includes (`include /usr/src/…-common/Makefile`)."""
    try:
        text = (directory / "Makefile").read_text(errors="replace")[:65536]
    except OSError:
        return None
    match = re.search(r"^include\s+(/\S+)/Makefile\s*$", text, re.MULTILINE)
    return Path(match[1]) if match else None


def _installed(root: Path, release: str) -> list[Path]:
    """Header trees below /usr/src and /lib/modules, those nearest to `release` first."""
    trees = [
        *(root / "usr/src").glob("linux-headers-*"),
        *(root / "usr/src").glob("linux-headers-*/3rdparty/canonical/linux-*/kernel-source"),
        *(root / "lib/modules").glob("*/build"),
    ]
    wanted = _version(release)

    def distance(tree: Path) -> tuple[int, int, str]:
        version = _version(str(tree))
        gap = abs((version[0] - wanted[0]) * 100 + version[1] - wanted[1])
        return (0 if release in str(tree) else 1, gap, str(tree))

    return sorted(trees, key=distance)


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def merged(headers: Headers, into: Path) -> Path:
    """One directory for both halves of a split package, made of links below `into`."""
    assert headers.directory and headers.common
    _merge(headers.directory.resolve(), headers.common.resolve(), into)
    return into


def _merge(first: Path, second: Path, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for name in {*os.listdir(first), *os.listdir(second)}:
        in_first, in_second = first / name, second / name
        if in_first.is_dir() and in_second.is_dir():
            _merge(in_first, in_second, into / name)
        else:
            (into / name).symlink_to(in_first if in_first.exists() else in_second)
