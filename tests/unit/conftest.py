"""Fixtures of the unit tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.public import Public


@pytest.fixture(scope="session")
def public() -> Iterator[Public]:
    """The program as an ordinary user runs it."""
    directory = Path(tempfile.mkdtemp(prefix="moetuner-test-"))
    yield Public(directory)
    shutil.rmtree(directory)
