"""The inspector's answer, checked before anything is attached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moetuner.watch.layout import FUNCTIONS

MAX_SITES = 256  # each is a probe; llama.cpp has 7


@dataclass(frozen=True)
class Places:
    """Offsets into the file: the functions, their entry sites, and all return sites.

    `unclear` says why returns cannot be probed at their sites; None if they can.
    """

    functions: dict[str, int]
    entries: dict[str, int]
    sites: tuple[int, ...]
    unclear: str | None

    @classmethod
    def parse(cls, answer: Any, size: int) -> Places:
        """`size`: the file's, in bytes. ValueError, TypeError or KeyError if the answer is
        not one of an inspector, or an offset lies outside the file."""
        if not isinstance(answer, dict):
            raise ValueError("the inspector gave no answer")
        if "error" in answer:
            raise ValueError(str(answer["error"]))
        unclear = answer["unclear"]
        places = cls(
            _named(answer["functions"], size),
            _named(answer["entries"], size),
            tuple(_offsets(answer["sites"], size)),
            None if unclear is None else str(unclear)[:300],
        )
        # An entry that nothing ends would hold the floor.
        whole = places.functions.keys() == places.entries.keys() and (
            places.sites or not places.functions
        )
        if places.unclear is None and not whole:
            raise ValueError("the inspector's answer is incomplete")
        if len(places.sites) > MAX_SITES:
            raise ValueError("the inspector found more returns than it may")
        return places


def _named(table: Any, size: int) -> dict[str, int]:
    if not isinstance(table, dict) or not set(table) <= set(FUNCTIONS):
        raise ValueError("the inspector named unknown functions")
    return dict(zip(table, _offsets(table.values(), size), strict=True))


def _offsets(values: Iterable[Any], size: int) -> list[int]:
    offsets = list(values)
    if not all(type(v) is int and 0 < v < size for v in offsets):
        raise ValueError("an offset lies outside the file")
    return offsets
