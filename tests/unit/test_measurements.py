"""The README's figures come from runs. Run alone: ./run-tests unit -k measurements"""

from __future__ import annotations

from benchmarks.table import MEASUREMENTS, README, ROWS, fill, newest


def test_the_readme_shows_the_newest_run() -> None:
    lines = MEASUREMENTS.read_text().splitlines()
    assert fill(README.read_text(), lines) == README.read_text(), "run benchmarks/run table"


def test_each_figure_of_a_published_run_is_a_number() -> None:
    results = newest(MEASUREMENTS.read_text().splitlines())
    assert results
    for name, key, *_ in ROWS:
        if name in results:
            assert isinstance(results[name]["figures"][key], float), f"{name} {key}"
