"""Machine code of many shapes: probes are where the calls begin and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moetuner.demo.llamacpp import LlamaBuild
from moetuner.watch import layout
from tests.bpf.conftest import Start
from tests.bpf.harness import Rig
from tests.bpf.natives import FUNCTIONS, Natives, copy, total
from tests.support.listing import Listing, examine

SHAPES: dict[str, tuple[str, ...]] = {
    "O0": ("-O0",),
    "O1": ("-O1",),
    "O2": ("-O2",),
    "O3": ("-O3",),
    "Os": ("-Os",),
    "cet": ("-O2", "-fcf-protection=full"),
    "no-plt": ("-O2", "-fno-plt", "-Wl,-z,now"),
    "frames": ("-O2", "-fno-omit-frame-pointer"),
    "one-segment": ("-O2", "-Wl,-z,noseparate-code"),
    "direct": ("-O2", "-fno-semantic-interposition"),
    "stack-protector": ("-O2", "-fstack-protector-all"),
}
LIVE = [("sites", "O0"), ("sites", "O2"), ("sites", "cet"), ("uretprobe", "O2")]


SOURCES = [("plain.cpp", "O0"), ("plain.cpp", "O2"), ("plain.cpp", "cet")]
SOURCES += [("shapes.c", shape) for shape in SHAPES]


@pytest.mark.parametrize(("source", "shape"), SOURCES)
def test_places(natives: Natives, source: str, shape: str) -> None:
    """Sites are the returns; entries come before the stack moves."""
    path = natives.library(source, *SHAPES[shape])
    places, listing = examine(path), Listing.of(path)
    assert places.unclear is None
    assert set(places.functions) == set(layout.FUNCTIONS)
    if shape != "no-plt":  # objdump does not name what is behind its jumps
        assert set(places.sites) == listing.returns()
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
    copy(natives.library("loop.c", "-O1"), path)
    driver = start()
    driver.load(path)
    rig.attached(path)
    assert driver.ask("call encode 23") == str(23 * 3)
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
