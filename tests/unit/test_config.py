"""The configuration file. Run alone: ./run-tests unit -k config"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetuner.config import KEYS, SECTIONS, Config, load, parse
from moetuner.errors import ConfigError

GOOD = [
    ("", Config(source="f")),
    ("# nothing\n", Config(source="f")),
    ("floor:\n#  hold: 2\nwatch:\n", Config(source="f")),
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_a_file_without_values_is_the_defaults(text: str, expected: Config) -> None:
    assert parse(text, "f") == expected


VALUES = [
    ("floor: {frequency: max}", "floor", "frequency_hz", None),
    ("floor: {frequency: 918 MHz}", "floor", "frequency_hz", 918_000_000),
    ("floor: {frequency: 1300.5MHz}", "floor", "frequency_hz", 1_300_500_000),
    ("floor: {frequency: 1.02 GHz}", "floor", "frequency_hz", 1_020_000_000),
    ("floor: {frequency: 1020000000}", "floor", "frequency_hz", 1_020_000_000),
    ("floor: {hold: 2}", "floor", "hold_s", 2.0),
    ("floor: {node: auto}", "floor", "node", None),
    ("floor: {node: gpu-gpc-0}", "floor", "node", "gpu-gpc-0"),
    ("floor: {yield_to_throttling: false}", "floor", "yield_to_throttling", False),
    ("watch: {libraries: [/opt/*/libllama.so]}", "watch", "libraries", ("/opt/*/libllama.so",)),
    ("watch: {returns: uretprobe}", "watch", "returns", "uretprobe"),
    ("match: {never: [llama-bench]}", "match", "never", ("llama-bench",)),
    ("match: {flags: [--my-moe]}", "match", "flags", ("--my-moe",)),
]


@pytest.mark.parametrize(("text", "section", "attribute", "expected"), VALUES)
def test_values(text: str, section: str, attribute: str, expected: object) -> None:
    assert getattr(getattr(parse(text, "f"), section), attribute) == expected


BAD = [
    ("a: 1", "f:1: unknown key a"),
    ("floor:\n  hodl: 1", "f:2: unknown key floor.hodl (did you mean hold?)"),
    ("floor: 3", "f:1: floor takes `key: value` lines"),
    ("- floor", "f:1: the file takes `key: value` lines"),
    ("\n\nfloor:\n  hold: long", "f:4: floor.hold: 'long' is not a number of seconds"),
    ("floor: {hold: 0}", "f:1: floor.hold: '0' is not a number of seconds from 0.1 to 60"),
    ("floor: {hold: .nan}", "f:1: floor.hold"),
    ("floor: {hold: .inf}", "f:1: floor.hold"),
    ("floor: {hold: true}", "f:1: floor.hold"),
    ("floor: {hold: 1, hold: 2}", "f:1: hold is given twice"),
    ("floor: {frequency: 1020}", "f:1: floor.frequency: '1020' is not `max`, or a frequency"),
    ("floor: {frequency: fast}", "f:1: floor.frequency"),
    ("floor: {node: ../../etc}", "f:1: floor.node"),
    ("floor: {node: ..}", "f:1: floor.node"),
    ("floor: {yield_to_throttling: 1}", "f:1: floor.yield_to_throttling: '1' is not true or false"),
    ("watch: {libraries: libllama.so}", "f:1: watch.libraries"),
    ("watch: {libraries: [libllama.so]}", "f:1: watch.libraries: a list is not a list of absolute"),
    ("watch: {returns: sometimes}", "f:1: watch.returns: 'sometimes' is not one of auto, sites"),
    ("match: {tensors: ['a b']}", "f:1: match.tensors: a list is not a list of tensor names"),
    ("match: {flags: [cpu-moe]}", "f:1: match.flags"),
    ("floor: [", "f:1: not valid YAML"),
    ("floor: {hold: !!python/object:os.system x}", "f:1: floor.hold"),
    ("\tfloor: 1", "f:1: not valid YAML"),
    ("? [a]\n: 1", "f:1: a list is not a key"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_errors_name_file_line_key_and_what_it_takes(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_each_key_belongs_to_a_field_and_says_what_it_takes() -> None:
    for key in KEYS:
        assert key.attribute in SECTIONS[key.section].__dataclass_fields__
        assert key.convert.__doc__


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.yaml")
    assert load(tmp_path / "none.yaml", optional=True) == Config()


def test_unreadable_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        load(big)


def test_aliases_that_explode_end_in_an_error() -> None:
    text = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(20))
    with pytest.raises(ConfigError):
        parse(text, "f")


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str | bytes) -> None:
    try:
        parse(text, "f")
    except ConfigError as error:
        assert str(error).startswith("f:")


_WORDS = st.sampled_from(
    ["floor", "watch", "match", "hold", "node", "[", "]", "{", "}", ":", "\n", "  ", "&a", "*a",
     "<<", "!!set", "1", "max", "-", "'", "|", ">", "? ", "%YAML 9.9\n---\n", "..."]
)  # fmt: skip


@given(st.lists(_WORDS, max_size=30).map("".join))
def test_text_made_of_yaml_pieces_too(text: str) -> None:
    try:
        parse(text, "f")
    except ConfigError as error:
        assert str(error).startswith("f:")
