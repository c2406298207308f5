"""An inspector's answer is believed only as far as it is possible."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetuner.watch.layout import FUNCTIONS
from moetuner.watch.places import MAX_SITES, Places

SIZE = 10_000
GOOD: dict[str, Any] = {
    "machine": "x86_64",
    "functions": {"llama_decode": 100, "llama_synchronize": 200},
    "entries": {"llama_decode": 104, "llama_synchronize": 200},
    "sites": [150, 250],
    "unclear": None,
}


def test_a_good_answer() -> None:
    places = Places.parse(GOOD, SIZE)
    assert places.functions == GOOD["functions"]
    assert places.entries == GOOD["entries"]
    assert places.sites == (150, 250)
    assert places.unclear is None


def test_an_unclear_answer_needs_the_functions_only() -> None:
    places = Places.parse({**GOOD, "entries": {}, "sites": [], "unclear": "x" * 1000}, SIZE)
    assert places.functions == GOOD["functions"]
    assert places.unclear == "x" * 300


def test_none_of_ours() -> None:
    assert not Places.parse({**GOOD, "functions": {}, "entries": {}, "sites": []}, SIZE).functions


BAD: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "an error": {"error": "no ELF"},
    "no functions": {k: v for k, v in GOOD.items() if k != "functions"},
    "no sites": {k: v for k, v in GOOD.items() if k != "sites"},
    "unknown function": {**GOOD, "functions": {"system": 100}},
    "functions are a list": {**GOOD, "functions": ["llama_decode"]},
    "offset past the end": {**GOOD, "sites": [SIZE]},
    "offset zero": {**GOOD, "sites": [0]},
    "negative": {**GOOD, "functions": {"llama_decode": -1}},
    "huge": {**GOOD, "sites": [10**30]},
    "a bool": {**GOOD, "sites": [True]},
    "a float": {**GOOD, "sites": [150.0]},
    "a text": {**GOOD, "sites": ["150"]},
    "sites are a text": {**GOOD, "sites": "150"},
    "sites are a number": {**GOOD, "sites": 150},
    "sites are null": {**GOOD, "sites": None},
    "entry missing": {**GOOD, "entries": {"llama_decode": 104}},
    "entry too many": {**GOOD, "functions": {"llama_decode": 100}},
    "no return at all": {**GOOD, "sites": []},
    "too many sites": {**GOOD, "sites": list(range(1, MAX_SITES + 2))},
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_bad_answer(answer: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Places.parse(answer, SIZE)


def test_an_error_is_passed_on() -> None:
    with pytest.raises(ValueError, match="no ELF"):
        Places.parse(BAD["an error"], SIZE)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FUNCTIONS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({key: values | st.just(GOOD[key]) for key in GOOD}))
def test_any_answer(answer: dict[str, Any]) -> None:
    try:
        places = Places.parse(json.loads(json.dumps(answer)), SIZE)
    except (ValueError, TypeError, KeyError):
        return
    offsets = [*places.functions.values(), *places.entries.values(), *places.sites]
    assert all(type(o) is int and 0 < o < SIZE for o in offsets)
    assert set(places.functions) <= set(FUNCTIONS)
    if places.unclear is None and places.functions:
        assert places.sites and places.entries.keys() == places.functions.keys()
