"""The shipped configuration and the man page say what the code does."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import moetuner
from moetuner import cli, config, errors, status
from moetuner.watch.watcher import Counters

ROOT = Path(__file__).parents[2]
YAML = (ROOT / "etc/moetuner.yaml").read_text()
MAN = (ROOT / "docs/moetuner.8").read_text()
KEYS = [f"{key.section}.{key.name}" for key in config.KEYS]


def described() -> dict[str, str]:
    """`floor.hold` → the comment above it, as one line."""
    found: dict[str, str] = {}
    section, comment = "", ""
    for line in YAML.splitlines():
        if match := re.match(r"(\w+):$", line):
            section = match[1]
        elif match := re.match(r"  #(\w+): ", line):
            found[f"{section}.{match[1]}"] = comment
        comment = f"{comment} {line.strip(' #')}" if re.match(r"  # ", line) else ""
    return found


def test_as_shipped_it_changes_nothing() -> None:
    assert replace(config.parse(YAML, "shipped"), source="") == replace(config.Config(), source="")


def test_every_key_is_there_in_order_with_an_explanation() -> None:
    assert list(described()) == KEYS
    assert [key for key, text in described().items() if len(text) < 40] == []


def test_the_values_shown_are_the_defaults() -> None:
    text, count = re.subn(r"^  #(?=\w+: )", "  ", YAML, flags=re.MULTILINE)
    assert count == len(KEYS)
    assert replace(config.parse(text, "shipped"), source="") == replace(config.Config(), source="")


@pytest.mark.parametrize("key", config.KEYS, ids=KEYS)
def test_each_is_switched_on_by_removing_the_number_sign(key: config.Key) -> None:
    """Removing one `#` and nothing else gives a file that means something."""
    line = re.compile(rf"^  #{key.name}: .*$", re.MULTILINE)
    broken = line.sub(f"  {key.name}: {{}}", YAML)
    with pytest.raises(errors.ConfigError, match=rf"shipped:\d+: {key.section}.{key.name}: "):
        config.parse(broken, "shipped")


@pytest.mark.parametrize("key", config.KEYS, ids=KEYS)
def test_ranges_and_choices_are_told(key: config.Key) -> None:
    takes = key.convert.__doc__ or ""
    text = described()[f"{key.section}.{key.name}"]
    numbers = set(re.findall(r"\d[\d.]*(?= |$|\))", takes))
    assert {n for n in numbers if not re.search(rf"(?<!\d){re.escape(n)}", text)} == set()
    if takes.startswith("one of "):
        for choice in takes.removeprefix("one of ").split(", "):
            assert re.search(rf"\b{choice}\b", text), choice


def test_the_examples_are_valid() -> None:
    examples = re.findall(r"such as (\[[^\]]*\])", YAML)
    assert len(examples) >= 3
    for name, example in zip(
        ("watch.libraries", "match.flags", "match.tensors"), examples, strict=True
    ):
        section, _, key = name.partition(".")
        config.parse(f"{section}:\n  {key}: {example}\n", name)
    config.parse("floor: {frequency: 918 MHz, node: 17000000.gpu}", "example")


def test_the_man_page_has_every_key() -> None:
    assert re.findall(r"^\.It Cm (\w+\.\w+)$", MAN, re.MULTILINE) == KEYS


def test_the_man_page_has_every_exit_code() -> None:
    section = MAN.partition(".Sh EXIT STATUS")[2].partition(".Sh")[0]
    listed = re.findall(r"^\.It (\d)$", section, re.MULTILINE)
    kinds: list[type[errors.MoetunerError]] = [errors.MoetunerError]
    kinds += errors.MoetunerError.__subclasses__()
    assert set(listed) == {"0"} | {str(kind.exit_code) for kind in kinds}
    assert listed == re.findall(r"^  (\d)  ", cli.EXIT_CODES, re.MULTILINE)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """`status`, `engine set` … → its parser."""
    group = parser._subparsers  # argparse has no public way to ask for these
    if group is None:
        return {}
    choices = group._group_actions[0].choices
    assert isinstance(choices, dict)
    found: dict[str, argparse.ArgumentParser] = {}
    for name, command in choices.items():
        below = {f"{name} {sub}": inner for sub, inner in _commands(command).items()}
        found |= below or {name: command}
    return found


def test_the_man_page_has_every_command_and_option() -> None:
    commands = MAN.partition(".Sh COMMANDS")[2].partition(".Sh")[0]
    options = MAN.partition(".Sh OPTIONS")[2].partition(".Sh")[0]
    choices = _commands(cli.parser())
    assert {"status", "engine set"} <= set(choices)
    assert set(re.findall(r"^\.It Cm ([\w ]+)$", commands, re.MULTILINE)) == set(choices)
    taken = {o for c in choices.values() for o in c._option_string_actions if o.startswith("--")}
    taken |= {"--help", "--version"}
    assert {f"-{o}" for o in re.findall(r"^\.It Fl (-\w+)", options, re.MULTILINE)} == taken


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(moetuner.__version__)}\b", text, re.MULTILINE)


def test_every_key_of_the_status_is_documented() -> None:
    text = (ROOT / "docs/status.md").read_text()
    keys = set(re.findall(r'"(\w+)":', inspect.getsource(status.snapshot)))
    keys |= {field.name for field in fields(Counters)} | {"updated"}
    assert len(keys) > 30
    assert {key for key in keys if not re.search(rf"`[^`\n]*\b{key}\b[^`\n]*`", text)} == set()
