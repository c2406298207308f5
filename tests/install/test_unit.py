"""The unit file, as systemd's own tools judge it, and the files that are shipped with it."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from moetuner import cli
from tests.install.system import ROOT, Result
from tests.support.machine import cannot

UNIT = ROOT / "systemd/moetuner.service"
# systemd-analyze security: 0 is no access at all, 10 all of it. What is left is what the
# daemon lives on: CAP_SYS_ADMIN for uprobes, other users' processes, AF_NETLINK. systemd
# 252 says 3.1; other versions weigh a little differently.
EXPOSURE = 3.2


def analyze(*arguments: str | Path) -> Result:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, cwd="/"
    )


def directives() -> list[tuple[str, str]]:
    """In order; a key may be there more than once."""
    return re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_understands_it(tmp_path: Path) -> None:
    unit = tmp_path / "moetuner.service"
    unit.write_text(UNIT.read_text().replace("/opt/moetuner/bin/moetuner", "/bin/true"))
    result = analyze("verify", "--man=no", unit)
    assert (result.returncode, result.stderr) == (0, "")


def test_its_exposure() -> None:
    if "--offline" not in analyze("--help").stdout:
        cannot("systemd is older than 250")
    result = analyze("security", "--offline=true", "--no-pager", UNIT)
    level = re.search(r"Overall exposure level for moetuner.service: ([\d.]+)", result.stdout)
    assert level, result.stderr
    assert float(level[1]) <= EXPOSURE


def test_each_directive_has_a_reason() -> None:
    """A comment stands above each run of directives, and no run is long."""
    section = UNIT.read_text().partition("[Service]\n")[2].partition("[Install]")[0]
    reasoned, run = False, 0
    for line in section.splitlines():
        if re.match(r"\w+=", line):
            run += 1
            assert reasoned, f"{line}: why?"
            assert run <= 4, f"{line}: one reason for too many"
        else:
            reasoned, run = line.startswith("#"), 0


def test_the_contract_with_the_daemon() -> None:
    unit = directives()
    for line in (
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("ExecStart", "/opt/moetuner/bin/moetuner daemon"),
        ("ExecReload", "/bin/kill -HUP $MAINPID"),
        ("ExecStopPost", "/opt/moetuner/bin/moetuner restore"),
        ("RestartPreventExitStatus", "2 3"),
        ("RuntimeDirectory", "moetuner"),
        # Or a restart would take the saved min_freq away from those who put it back.
        ("RuntimeDirectoryPreserve", "yes"),
        # It makes itself a real-time process without CAP_SYS_NICE.
        ("LimitRTPRIO", "1"),
    ):
        assert line in unit


@pytest.mark.parametrize("key", [k for k, _ in directives() if not k.startswith("System")])
def test_no_directive_is_there_twice(key: str) -> None:
    assert [k for k, _ in directives()].count(key) == 1


def test_the_shell_parts() -> None:
    scripts = [ROOT / "install.sh", *(ROOT / "installer").glob("*.sh")]
    scripts += [ROOT / "etc/moetuner.bash-completion", *Path(__file__).parent.glob("*.sh")]
    result = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p moetuner | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(*words: str) -> set[str]:
    result = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(ROOT / "etc/moetuner.bash-completion"), *words],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def _takes(parser: argparse.ArgumentParser) -> tuple[set[str], dict[str, argparse.ArgumentParser]]:
    """Its long options and its commands."""
    group = parser._subparsers  # argparse has no public way to ask for these
    choices = group._group_actions[0].choices if group else {}
    assert isinstance(choices, dict)
    return {o for o in parser._option_string_actions if o.startswith("--")}, choices


def test_completion_offers_what_the_parser_takes() -> None:
    _, commands = _takes(cli.parser())
    options = {"--help", "--version"}
    assert offered("moetuner", "") == set(commands) | options | {"--check"}
    for name, command in commands.items():
        taken, below = _takes(command)
        assert offered("moetuner", name, "") == taken | set(below), name
        for part, inner in below.items():
            assert offered("moetuner", name, part, "") == _takes(inner)[0], (name, part)
    assert offered("moetuner", "--check", "") == offered("moetuner", "check", "")


def test_completion_of_words_and_files(tmp_path: Path) -> None:
    assert offered("moetuner", "st") == {"status"}
    assert offered("moetuner", "status", "--w") == {"--watch"}
    (tmp_path / "board").mkdir()
    (tmp_path / "my.yaml").touch()
    begin = f"{tmp_path}/"
    assert offered("moetuner", "status", "--root", begin) == {f"{begin}board"}
    assert f"{begin}my.yaml" in offered("moetuner", "daemon", "--config", begin)
