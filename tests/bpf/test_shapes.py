"""Machine code of many shapes: probes are where the calls begin and end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import LlamaBuild
from moetuner.watch import layout
from moetuner.watch.places import Places
from moetuner.watch.survey import inspect
from tests.bpf.conftest import Start
from tests.bpf.harness import Rig
from tests.bpf.natives import FUNCTIONS, Natives, copy, total
from tests.support.listing import Listing

SHAPES: dict[str, tuple[str, ...]] = {
    "O0": ("-O0",),
    "O1": ("-O1",),
    "O2": ("-O2",),
    "O3": ("-O3",),
    "Os": ("-Os",),
    "cet": ("-O2", "-fcf-protection=full"),
    "no-plt": ("-O2", "-fno-plt", "-Wl,-z,now"),
    "eager": ("-O2", "-Wl,-z,now", "-Wl,-z,relro"),
    "frames": ("-O2", "-fno-omit-frame-pointer"),
    "one-segment": ("-O2", "-Wl,-z,noseparate-code"),
    "sections": ("-O2", "-ffunction-sections", "-Wl,--gc-sections"),
    "direct": ("-O2", "-fno-semantic-interposition"),
    "stack-protector": ("-O2", "-fstack-protector-all"),
    "clash": ("-O2", "-fstack-clash-protection"),
}
LIVE = [("sites", "O0"), ("sites", "O2"), ("sites", "cet"), ("uretprobe", "O2")]


def examine(path: Path) -> Places:
    with path.open("rb") as file:
        return Places.parse(json.loads(inspect(file.fileno())), path.stat().st_size)


@pytest.mark.parametrize("source", ["plain.cpp", "shapes.c"])
@pytest.mark.parametrize("flags", SHAPES.values(), ids=SHAPES)
def test_sites_are_the_returns(natives: Natives, source: str, flags: tuple[str, ...]) -> None:
    path = natives.library(source, *flags)
    places = examine(path)
    assert places.unclear is None
    assert set(places.functions) == set(layout.FUNCTIONS)
    assert "-fno-plt" in flags or set(places.sites) == Listing.of(path).returns()


@pytest.mark.parametrize("flags", SHAPES.values(), ids=SHAPES)
def test_entries_come_before_the_stack_moves(natives: Natives, flags: tuple[str, ...]) -> None:
    path = natives.library("shapes.c", *flags)
    places, listing = examine(path), Listing.of(path)
    for name, entry in places.entries.items():
        before = [words for at, words in listing.functions[name] if at < entry]
        assert entry in [at for at, _ in listing.functions[name]]
        assert not [w for w in before if re.match(r"push|pop|call|j\w+|ret|.*,%rsp$", w)], name


@pytest.mark.root
@pytest.mark.parametrize(("rig", "shape"), LIVE, indirect=["rig"])
def test_live(rig: Rig, natives: Natives, start: Start, tmp_path: Path, shape: str) -> None:
    path = tmp_path / "libshape.so"
    copy(natives.library("shapes.c", *SHAPES[shape]), path)
    driver = start()
    driver.load(path)
    assert rig.attached(path).returns == rig.config.returns
    for function in FUNCTIONS:
        before = rig.count(driver.pid)
        assert driver.ask(f"call {function} 23") == str(total(function, 23))
        assert rig.count(driver.pid) - before == 23, function
        assert not rig.inside(driver.pid), function
        driver.ask(f"inside {function}")
        assert rig.inside(driver.pid), function
        assert driver.ask("return") == "returned"
        assert not rig.inside(driver.pid), function


@pytest.mark.root
def test_a_loop_at_the_start_counts_once(
    rig: Rig, natives: Natives, start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "libloop.so"
    copy(natives.library("loop.c"), path)
    driver = start()
    driver.load(path)
    rig.attached(path)
    driver.ask("call encode 23")
    assert rig.count(driver.pid) == 23


def test_stripped_code_is_clear_or_says_why(natives: Natives) -> None:
    plain = examine(natives.library("plain.cpp", strip=True))
    assert plain.unclear is None
    assert len(plain.sites) == 4
    # Without .symtab the tail-called helpers have no bounds.
    shapes = examine(natives.library("shapes.c", strip=True))
    assert shapes.unclear is not None
    assert "no symbol" in shapes.unclear
    assert set(shapes.functions) == set(layout.FUNCTIONS)


def test_the_real_library_is_clear(llama: LlamaBuild) -> None:
    path = llama.libllama.resolve()
    places = examine(path)
    assert places.unclear is None
    assert set(places.functions) == set(layout.FUNCTIONS)
    assert set(places.sites) <= Listing.of(path).returns(everywhere=True)
