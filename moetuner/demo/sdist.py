"""Fetches one source distribution through pip and unpacks the part that is needed.

pip knows the user's index, proxy and certificates; nothing here names a host.
`pip download` of a source distribution asks the package's own build backend for
its metadata, which would install that backend and its requirements first
(56 s instead of 7 s). So pip gets a backend of twelve lines that answers with what
we asked for; the archive is checked against its hash before anything runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moetuner.errors import MissingRequirement, SystemRefused, reason


@dataclass(frozen=True)
class Sdist:
    """A pinned source distribution; `backend` is the module named in its pyproject.toml."""

    project: str
    version: str
    sha256: str
    backend: str

    @property
    def stem(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}"


_BACKEND = '''\
"""PEP 517 hook that states the metadata of {stem}; it can build nothing."""
import pathlib


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    info = pathlib.Path(directory, "{stem}.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\\nName: {project}\\nVersion: {version}\\n"
    )
    return info.name
'''


def download(sdist: Sdist, directory: Path, *, show_progress: bool = False) -> Path:
    """The archive in `directory`, fetched if it is not there; its hash is always checked.

    `show_progress`: pip's own bar on stderr, for a terminal.

    Raises MissingRequirement without pip or without the index, SystemRefused if
    the file has another hash or the disk is full.
    """
    archive = directory / f"{sdist.stem}.tar.gz"
    if archive.is_file():
        if _sha256(archive) == sdist.sha256:
            return archive
        raise SystemRefused(f"{archive} is damaged or another version", "remove it and try again")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemRefused(f"cannot make {directory}: {reason(error)}") from error
    # Not in /tmp, which may be small: pip unpacks 250 MB to look for the metadata.
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=directory) as scratch:
        _write_backend(Path(scratch, "backend"), sdist)
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"{sdist.project}=={sdist.version} --hash=sha256:{sdist.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-cache-dir"]
        command += ["--progress-bar", "on" if show_progress else "off"]
        command += ["--require-hashes", "-r", str(requirements), "-d", scratch]
        search = os.pathsep.join(
            part
            for part in (str(Path(scratch, "backend")), os.environ.get("PYTHONPATH", ""))
            if part
        )
        result = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": search, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show_progress else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if result.returncode != 0:
            raise _explained(sdist, result.stderr)
        Path(scratch, archive.name).rename(archive)
    return archive


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_backend(directory: Path, sdist: Sdist) -> None:
    package, _, module = sdist.backend.rpartition(".")
    place = directory.joinpath(*package.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / f"{module}.py").write_text(
        _BACKEND.format(stem=sdist.stem, project=sdist.project, version=sdist.version)
    )


def _explained(sdist: Sdist, stderr: str) -> MissingRequirement | SystemRefused:
    """The one sentence behind pip's output."""
    name = f"{sdist.project} {sdist.version}"
    if "No module named pip" in stderr:
        return MissingRequirement(
            f"{name} cannot be fetched: this Python has no pip",
            f"install python3-pip, or put {sdist.stem}.tar.gz into the cache directory",
        )
    if "No space left" in stderr:
        return SystemRefused(f"the disk is full while fetching {name}", "75 MB are needed")
    if "DO NOT MATCH THE HASHES" in stderr:
        return SystemRefused(
            f"{name} as served by the package index is not the file this version was tested with",
            f"expected sha256 {sdist.sha256}; try again, or another index",
        )
    errors = re.findall(r"^ERROR: (.+)", stderr, re.MULTILINE) or ["pip failed"]
    return MissingRequirement(
        f"{name} cannot be fetched from the package index: {errors[-1][:200]}",
        f"check the network (pip's index and proxy settings are used), or put {sdist.stem}.tar.gz "
        "into the cache directory",
    )


def unpack(archive: Path, member: str, skip: frozenset[str], destination: Path) -> None:
    """Directory `member` of the archive as `destination`, without its children in `skip`.

    `destination` appears only when complete. Links are left out. Raises
    SystemRefused when the disk is full or the archive has no such directory.
    """
    part = destination.with_name(destination.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    prefix = PurePosixPath(member)
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                path = PurePosixPath(*PurePosixPath(entry.name).parts[1:])
                if not path.is_relative_to(prefix):
                    continue
                inside = path.relative_to(prefix)
                if not inside.parts or inside.parts[0] in skip or ".." in inside.parts:
                    continue
                target = part / inside
                if entry.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                elif entry.isfile():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    source = tar.extractfile(entry)
                    assert source is not None
                    with source, target.open("wb") as file:
                        shutil.copyfileobj(source, file)
                    target.chmod(0o755 if entry.mode & 0o100 else 0o644)
        if not part.is_dir():
            raise SystemRefused(f"{archive} has no {member}", "remove it and try again")
        part.rename(destination)
    except OSError as error:
        raise SystemRefused(f"cannot unpack into {destination}: {reason(error)}") from error
