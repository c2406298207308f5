"""translate(): finds what std::regex finds, refuses what could hurt.

Alone: python -m pytest tests/unit/test_ecmascript.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from moetuner import ecmascript
from moetuner.ecmascript import translate

GOLDEN = Path(__file__).parent / "data" / "std_regex.txt"  # how: tests/support/std_regex.cpp
NAMES, _, _RESULTS = GOLDEN.read_text("ascii").partition("\n\n")
# Valid to std::regex, and refused: nobody needs them for the name of a tensor.
NOT_NEEDED = {
    *("[[.a.]]", "a**", "a++", "a*+", "e{1}{2}"),
    *(r"(a)\1", r"[\b]", "[[:space:]]", "[[:blank:]]x"),
    *(r"\x62lk", r"\u0062lk", r"\n", r"\cA", r"\0"),
}
FLAGS = regex.V0 | regex.ASCII | regex.MULTILINE


def results() -> list[tuple[str, str]]:
    rows = (line.partition(" ") for line in _RESULTS.splitlines())
    return [(result, pattern) for result, _, pattern in rows]


def found_in(pattern: str, text: str) -> str:
    """One digit for each line of `text`: 1 where the translated pattern is found."""
    lines = set()
    for match in regex.compile(f"(?:{translate(pattern)}).*", FLAGS).finditer(text, timeout=5):
        assert "\n" not in match[0], "matched beyond its line"
        lines.add(text.count("\n", 0, match.start()))
    return "".join("01"[number in lines] for number in range(text.count("\n") + 1))


def test_the_golden_file_is_whole() -> None:
    rows = results()
    assert len(rows) > 100
    assert {len(result) for result, _ in rows if result != "error"} == {NAMES.count("\n") + 1}
    assert {pattern for _, pattern in rows} >= NOT_NEEDED


@pytest.mark.parametrize(
    ("result", "pattern"),
    [pytest.param(*row, id=row[1]) for row in results() if row[0] != "error"],
)
def test_finds_what_std_regex_finds(result: str, pattern: str) -> None:
    if pattern in NOT_NEEDED:
        with pytest.raises(ValueError):
            translate(pattern)
    else:
        assert found_in(pattern, NAMES) == result


@pytest.mark.parametrize("pattern", [pattern for result, pattern in results() if result == "error"])
def test_refuses_what_std_regex_refuses(pattern: str) -> None:
    with pytest.raises((ValueError, regex.error)):
        found_in(pattern, NAMES)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("(?R)", id="recursion"),
        pytest.param("(?1)", id="group call"),
        pytest.param("(?:exps){e<=3}", id="fuzzy"),
        pytest.param("(?<=a)b", id="look-behind"),
        pytest.param("(?i:a)", id="inline flags"),
        pytest.param("(?|a|b)", id="branch reset"),
        pytest.param("(*FAIL)", id="verb"),
        pytest.param("a\nb", id="line feed"),
        pytest.param("a\x00b", id="NUL"),
        pytest.param("\udcff", id="undecodable byte"),
        pytest.param("é", id="not ASCII"),
        pytest.param("x" * 5000, id="long"),
        pytest.param("(" * 31 + ")" * 31, id="deep"),
        pytest.param("(" * 4000, id="very deep"),
        pytest.param("(x{9999}){9999}", id="unfolds to 100 million"),
        pytest.param("(x{100}){100}", id="unfolds to 10 thousand"),
        pytest.param("((((((((x{9}){9}){9}){9}){9}){9}){9}){9}){9}", id="unfolds in steps"),
        pytest.param("x{70}" * 80, id="unfolds in a row"),
        pytest.param("x{99999}", id="five digits"),
    ],
)
def test_refuses_what_could_hurt(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        translate(pattern)


def test_letters_that_mean_something_to_the_package_stand_for_themselves() -> None:
    # libstdc++ takes an unknown escaped letter for the letter.
    assert found_in(r"\p\K", "apKb\nap") == "10"
    assert found_in(r"\X", "blk\nX") == "01"
    assert found_in(r"\L<words>", "L<words>\nwords") == "10"


def test_limits_leave_room_for_what_people_write() -> None:
    layers = "|".join(str(layer) for layer in range(512))
    assert found_in(rf"blk\.({layers})\.ffn_.*_exps\.", NAMES)[:2] == "11"
    assert ecmascript.LENGTH_LIMIT >= 4096


TOKENS = r"""
    a b k . \. blk exps _ [a-z] [^.] \d [0-9]+ \w \W \D \s \S [^a-f] [\D] [^\w] [[:digit:]_]
    - ] } $ ^ \b \B [] [^] weight ffn 1 up [-_] [.-] ( (?: (?= (?! ) | * + ? {1,2} {2} {0,3} *?
    {0} [ { \ (? [: :] ~ && -- , e<=1
"""


@given(st.lists(st.sampled_from(TOKENS.split()), max_size=20).map("".join))
@settings(deadline=None, max_examples=300)
def test_any_pattern_is_refused_or_stays_within_its_line(pattern: str) -> None:
    # Names one by one and names in one text must agree: that is what `translate` promises.
    try:
        together = found_in(pattern, NAMES)
    except (ValueError, regex.error, TimeoutError):
        return
    assert together == "".join(found_in(pattern, name) for name in NAMES.splitlines())
