"""Arguments, exit codes, and what a user gets to read when something is wrong.

./run-tests unit -k cli
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moetuner
from moetuner import check, cli
from tests.support.boards import ORIN_NANO_JP6
from tests.support.public import REPOSITORY, Public

RESTORE_NOTHING = "nothing was saved\n"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    ORIN_NANO_JP6.write(tmp_path / "board")
    return tmp_path / "board"


def run(
    *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moetuner", *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("fly", 2, r"moetuner: argument COMMAND: invalid choice: 'fly' \(.*\) \(moetuner --help\)"),
        ("--fly", 2, r"moetuner: unrecognized arguments: --fly \(moetuner --help\)"),
        ("status --fly", 2, r"moetuner: unrecognized arguments: --fly \(moetuner --help\)"),
        ("status --json --watch", 2, r"moetuner: .* not allowed with .*\(moetuner status --help\)"),
        ("status extra", 2, r"moetuner: unrecognized arguments: extra \(moetuner --help\)"),
        ("check --root", 2, r"moetuner: .*expected one argument \(moetuner check --help\)"),
        ("status --root /no/such", 2, r"moetuner: --root /no/such: No such file or directory"),
        ("restore --root /no/such", 2, r"moetuner: --root /no/such: No such file or directory"),
        ("check --root /etc/passwd", 2, r"moetuner: --root /etc/passwd: Not a directory"),
        ("daemon --root /no/such", 2, r"moetuner: --root /no/such: No such file or directory"),
        ("daemon --root BOARD --config /no", 2, r"moetuner: /no: no such file \(.*\)"),
        ("daemon --root BOARD --config /etc", 2, r"moetuner: /etc: Is a directory"),
        ("daemon --root BOARD --config BAD", 2, r"moetuner: .*bad\.yaml:2: floor\.hold: .*"),
        ("status --root BOARD", 1, r"moetuner: the moetuner daemon is not running \(.*\)"),
        ("status --root BOARD --json", 1, r"moetuner: the moetuner daemon is not running \(.*\)"),
        ("restore --root BOARD", 0, ""),
    ],
)
def test_arguments(
    arguments: str,
    code: int,
    error: str,
    board: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("floor:\n  hold: forever\n")
    words = arguments.replace("BOARD", str(board)).replace("BAD", str(bad)).split()
    assert cli.main(words) == code
    written = capsys.readouterr()
    assert re.fullmatch(error + "\n" if error else "", written.err), written.err
    assert written.out == (RESTORE_NOTHING if code == 0 else "")


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert cli.main(["restore", "--root", str(tmp_path / "typo")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_it_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "exit codes:" in capsys.readouterr().out


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"moetuner {moetuner.__version__}\n")


@pytest.mark.parametrize("words", [["--check"], ["check"]])
def test_both_spellings_of_check(
    words: list[str],
    board: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[Path, Path | None]] = []

    def findings(root: Path, config: Path | None) -> list[check.Finding]:
        asked.append((root, config))
        return [check.Finding("gpu", check.OK, "there")]

    monkeypatch.setattr(check, "run", findings)
    assert cli.main([*words, "--json", "--root", str(board), "--config", "x"]) == 0
    assert asked == [(board, Path("x"))]
    assert json.loads(capsys.readouterr().out)["ready"] is True


def test_a_defect_is_reported_as_one_and_briefly(
    board: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(root: Path, config: Path | None) -> list[check.Finding]:
        raise KeyError("x")

    monkeypatch.setattr(check, "run", broken)
    assert cli.main(["check", "--root", str(board)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("moetuner: unexpected failure: KeyError: 'x'\n")
    assert "Traceback" not in error and len(error.splitlines()) < 14


@pytest.mark.parametrize("command", [["--help"], ["status", "--help"], ["restore"]])
def test_a_reader_that_is_gone_is_no_failure(command: list[str], board: Path) -> None:
    """`moetuner … | head -0`"""
    root = ["--root", str(board)] if "--help" not in command else []
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "moetuner", *command, *root],
        cwd=REPOSITORY,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_where_the_locale_knows_ascii_only(board: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("check", "--root", board, "--config", "/no/such/thing", env=ascii_only)
    assert done.returncode == 1
    assert "unexpected failure" not in done.stderr
    assert "/no/such/thing: no such file" in done.stdout


# -- as an ordinary user -------------------------------------------------------------------


@pytest.mark.parametrize("command", ["daemon", "restore"])
def test_without_root_one_sentence_says_so(public: Public, command: str) -> None:
    for root in (("--root", str(public.board(ORIN_NANO_JP6))), ()):
        done = public.run(command, *root)
        assert done.returncode == 3, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("moetuner: ") and "run with sudo" in line


def test_without_root_but_with_a_board_of_one_s_own(public: Public) -> None:
    """It gets as far as the probe."""
    root = public.directory / "own-board"
    ORIN_NANO_JP6.write(root)
    root.joinpath("run").chmod(0o777)
    done = public.run("daemon", "--root", root)
    assert done.returncode == 3, done.stderr
    assert re.search(r"^moetuner: .*(root|BPF|headers|bcc).*", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_a_root_that_may_not_be_read(public: Public) -> None:
    closed = public.directory / "closed"
    closed.mkdir(mode=0o700)
    if os.geteuid() != 0:
        closed.chmod(0)
    done = public.run("status", "--root", closed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"moetuner: --root {closed}: Permission denied\n"


def test_a_configuration_that_may_not_be_read(public: Public) -> None:
    secret = public.directory / "secret.yaml"
    secret.write_text("floor: {}\n")
    secret.chmod(0o600 if os.geteuid() == 0 else 0)
    done = public.run("daemon", "--config", secret)
    assert (done.returncode, done.stderr) == (2, f"moetuner: {secret}: Permission denied\n")
    done = public.run("check", "--config", secret)
    assert done.returncode == 1
    assert re.search(rf"^missing +configuration +{secret}: Permission denied$", done.stdout, re.M)
