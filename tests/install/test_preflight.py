"""What install.sh says before it changes anything, and its command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.system import NOBODY, ROOT, Result, checkout

JETPACK_6 = "# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Thu\n"


def call(script: str, *arguments: str | Path, path: Path | None = None) -> Result:
    """A line of bash with install.sh's functions; `path`: its programs come first."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f'source "{ROOT}/install.sh"; {script}', "bash", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search, "TMPDIR": str(path or "/tmp")},
    )


def run(*arguments: str, **options: object) -> Result:
    environment = {k: v for k, v in os.environ.items() if k != "DESTDIR"}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(ROOT / "install.sh"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        **options,
    )


@pytest.mark.parametrize(
    ("release", "status", "said"),
    [
        (None, 0, ""),
        ("something else\n", 0, ""),
        (JETPACK_6, 0, ""),
        ("# R38 (release), REVISION: 2.0, GCID: 1\n", 0, ""),
        ("# R39 (release), REVISION: 0.0, GCID: 1\n", 0, ""),
        ("# R41 (release), REVISION: 0.0, GCID: 1\n", 0, "newer than anything"),
        (
            "# R35 (release), REVISION: 4.1, GCID: 1\n",
            3,
            "JetPack 5 (L4T R35), whose Python is 3.8",
        ),
        ("# R32 (release), REVISION: 7.1, GCID: 1\n", 3, "L4T R32, which is too old"),
    ],
)
def test_boards(tmp_path: Path, release: str | None, status: int, said: str) -> None:
    file = tmp_path / "nv_tegra_release"
    if release is not None:
        file.write_text(release)
    result = call('check_board "$1"', file)
    assert result.returncode == status, result.stderr
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == (1 if said else 0)


def test_other_processors_are_refused() -> None:
    assert call("check_machine aarch64; check_machine x86_64").returncode == 0
    result = call("check_machine riscv64")
    assert (result.returncode, result.stderr) == (
        3,
        "install.sh: moetuner runs on aarch64 and x86_64, not on riscv64\n",
    )


def _program(directory: Path, name: str, text: str) -> Path:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    old = _program(tmp_path, "python3", 'test "$1" = -V && echo Python 3.8.10 && exit; exit 1')
    result = call('check_python "$1"', old)
    assert result.returncode == 3
    assert result.stderr == (
        f"install.sh: {old} is Python 3.8.10: moetuner needs Python 3.10 or newer\n"
    )


def test_missing_modules_are_named_by_their_packages(tmp_path: Path) -> None:
    """Every module that the program requires, from a Python that has none of them."""
    venv.create(tmp_path / "bare", system_site_packages=False, with_pip=False)
    named = call('missing_modules "$1"', tmp_path / "bare/bin/python3").stdout.split()
    listed = re.search(
        r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert listed
    required = {name.lower() for name in re.findall(r'"(\w+)>=', listed[1])}
    packages = {f"python3-{name.removeprefix('py')}" for name in required}
    packages |= {"python3-pyudev", "python3-pyelftools", "python3-bpfcc"}
    packages -= {"python3-udev", "python3-elftools"}
    assert set(named) - {"libbpf1"} == packages


def test_nothing_is_missing_here_for_the_tests_own_python() -> None:
    """./run-tests has installed all of it: what is found is not called missing."""
    assert call('missing_modules "$1"', sys.executable).stdout == ""


def test_without_python_everything_is_missing(tmp_path: Path) -> None:
    named = call('missing_modules "$1"; missing_headers "$1"', tmp_path / "python3").stdout
    assert {"python3", "python3-bpfcc", "libbpf1", "kernel headers"} <= set(named.splitlines())


@pytest.mark.parametrize(
    ("known", "headers"),
    [
        ("linux-headers-5.15.0-1 linux-headers-arm64", "linux-headers-5.15.0-1"),
        ("nvidia-l4t-kernel-headers linux-headers-generic", "nvidia-l4t-kernel-headers"),
        ("linux-headers-arm64", "linux-headers-arm64"),
        ("linux-headers-generic", "linux-headers-generic"),
        ("", "linux-headers-generic"),
    ],
)
def test_the_header_package(tmp_path: Path, known: str, headers: str) -> None:
    """The running kernel's, then the board's, then any of this architecture."""
    _program(tmp_path, "apt-cache", f'case " {known} " in *" $2 "*) exit 0;; esac; exit 100')
    _program(tmp_path, "dpkg", "echo arm64")
    result = call('package_for "kernel headers" 5.15.0-1', path=tmp_path)
    assert result.stdout == f"{headers}\n"


def test_ubuntu_22_04_has_the_older_libbpf(tmp_path: Path) -> None:
    _program(tmp_path, "apt-cache", 'test "$2" = libbpf0')
    assert call("package_for libbpf1 6.1", path=tmp_path).stdout == "libbpf0\n"


def test_packages_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    _program(tmp_path, "apt-cache", "exit 0")
    _program(tmp_path, "apt-get", "echo 'E: Unable to fetch some archives' >&2; exit 100")
    result = call("install_packages python3-bpfcc python3-rich", path=tmp_path)
    assert result.returncode == 3
    assert "E: Unable to fetch some archives" in result.stderr
    assert "cannot install what is missing: python3-bpfcc, python3-rich;" in result.stderr


def test_a_machine_without_apt_is_told_what_to_install(tmp_path: Path) -> None:
    for name in ("bash", "sed", "dirname", "readlink"):
        (tmp_path / name).symlink_to(Path("/usr/bin") / name)
    result = subprocess.run(
        ["/bin/bash", "-c", f"source {ROOT}/install.sh; install_packages python3-bpfcc libbpf1"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert result.returncode == 3
    assert result.stderr.startswith("install.sh: missing: python3-bpfcc, libbpf1; there is no apt")


def test_packages_are_asked_for_only_when_something_is_missing(tmp_path: Path) -> None:
    _program(tmp_path, "apt-get", f"echo called >>{tmp_path}/log")
    nothing = 'nothing() { :; }; PYTHON=python3; require nothing nothing && echo "went on"'
    assert call(nothing, path=tmp_path).stdout == "went on\n"
    assert not (tmp_path / "log").exists()
    still = 'something() { echo libfoo; }; PYTHON=python3; require something && echo "went on"'
    result = call(still, path=tmp_path)
    assert result.returncode == 3
    assert "still missing after the installation: libfoo" in result.stderr
    assert (tmp_path / "log").read_text() == "called\ncalled\n", "update, install"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "{own}"}, "{own}/.cache/moetuner"),
        ({"HOME": "{own}", "XDG_CACHE_HOME": "{own}/c"}, "{own}/c/moetuner"),
        ({"HOME": "{own}", "XDG_CACHE_HOME": "relative"}, "{own}/.cache/moetuner"),
        ({"HOME": "{others}", "XDG_CACHE_HOME": "{others}"}, "{root}/.cache/moetuner"),
        ({}, "{root}/.cache/moetuner"),
    ],
)
@pytest.mark.root
def test_the_demonstration_s_cache_is_root_s_own(
    tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    """sudo may leave HOME at the user's."""
    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir()
    others.mkdir()
    os.chown(others, NOBODY, NOBODY)
    places = {"own": own, "others": others, "root": Path("~root").expanduser()}
    result = subprocess.run(
        ["bash", "-c", f"source {ROOT}/install.sh; demo_cache"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]}
        | {name: value.format(**places) for name, value in environment.items()},
    )
    assert result.stdout == expected.format(**places) + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frobnicate"], "unknown option --frobnicate"),
        (["install"], "unknown option install"),
        (["--prefix"], "--prefix needs a directory"),
        (["--prefix", "usr"], "--prefix takes an absolute path"),
        (["--keep"], "--keep goes with --demo"),
        (["--demo", "--uninstall"], "exclude each other"),
        (["--purge", "--demo"], "exclude each other"),
    ],
)
def test_usage(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_help_names_every_option() -> None:
    text = run("--help").stdout
    options = set(re.findall(r"^ +(--[\w-]+)", text, re.MULTILINE))
    source = (ROOT / "install.sh").read_text()
    parsed = set(re.findall(r"--[a-z][\w-]+(?= *(?:\||\)))", source[source.index("\nmain()") :]))
    assert parsed == options


@pytest.fixture(scope="module")
def public_checkout() -> Iterator[Path]:
    """Where an ordinary user can read it: the checkout itself may lie in root's home."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield checkout(Path(directory) / "moetuner")


@pytest.mark.root
@pytest.mark.parametrize("arguments", [[], ["--uninstall"], ["--purge"], ["--demo"]])
def test_root_is_needed(arguments: list[str], public_checkout: Path) -> None:
    script = f"source {public_checkout}/install.sh; main {' '.join(arguments)}"
    result = subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "bash", "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert result.returncode == 3
    assert result.stderr.startswith("install.sh: root is needed: sudo ./install.sh")


@pytest.mark.root
def test_without_systemd_it_says_what_can_be_done() -> None:
    if Path("/run/systemd/system").exists():
        result = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs x /run && {ROOT}/install.sh"],
            capture_output=True,
            text=True,
        )
    else:
        result = run()
    assert result.returncode == 3
    assert "systemd does not run here" in result.stderr
    assert "--demo" in result.stderr
    assert "--no-start" in result.stderr
