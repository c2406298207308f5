"""Fixtures that several parts share, and the rule about skips.

A skip is accepted only for a fact about the machine (tests/support/machine.py); with
CI=true or in ./run-tests every other skip is a failure, and in CI so is not being root.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from moetuner.demo import board as boards
from moetuner.demo import llamacpp
from tests.support.llama import Servers
from tests.support.machine import CANNOT, cannot, strict


def pytest_configure() -> None:
    # Started in the background of a script, SIGINT is ignored, and what the tests start
    # would inherit that: Ctrl-C is one of the things they try.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--llama", metavar="DIR", type=Path, help="use this build directory of llama.cpp"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must run as root, or this test never runs", pytrace=False)
        cannot("not root")


@pytest.hookimpl(hookwrapper=True)  # type: ignore[untyped-decorator, unused-ignore]
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    _judge(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)  # type: ignore[untyped-decorator, unused-ignore]
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    outcome = yield
    _judge(outcome.get_result())


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip without an accepted reason into a failure."""
    if not report.skipped or hasattr(report, "wasxfail") or not strict():
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if CANNOT not in reason:
        report.outcome = "failed"
        report.longrepr = f"skipped, though this machine could run it: {reason}"


@pytest.fixture(scope="session")
def llama(request: pytest.FixtureRequest) -> llamacpp.LlamaBuild:
    """The real llama.cpp; built in the cache directory if it is not there (ten minutes)."""
    given: Path | None = request.config.getoption("--llama")
    return llamacpp.describe(given.absolute()) if given else llamacpp.ensure()


@pytest.fixture(scope="session")
def moe_model() -> Path:
    """A qwen3moe of 4 layers × 8 experts, two used; 15 MB."""
    from moetuner.demo.model import ModelSpec, ensure

    return ensure(ModelSpec(), llamacpp.cache_directory() / "models")


@pytest.fixture(scope="session")
def dense_model() -> Path:
    """Its dense twin."""
    from moetuner.demo.model import ModelSpec, ensure

    return ensure(ModelSpec().dense(), llamacpp.cache_directory() / "models")


@pytest.fixture
def llama_servers(llama: llamacpp.LlamaBuild, tmp_path: Path) -> Iterator[Servers]:
    """`llama_servers.start(model, "--cpu-moe")` gives one that is ready; all end with the test."""
    servers = Servers(llama, tmp_path)
    yield servers
    servers.stop()


@pytest.fixture
def simulated_board(tmp_path: Path) -> boards.Board:
    """The tree of an Orin Nano Super in plain files, without its governor."""
    return boards.create(tmp_path / "board")
