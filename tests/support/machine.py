"""What this machine can do: the only accepted reasons to skip a test."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

CANNOT = "this machine cannot"


def cannot(reason: str) -> NoReturn:
    """Skips because of a fact about the machine. `reason` names the fact, not the test."""
    pytest.skip(f"{CANNOT}: {reason}")


def strict() -> bool:
    """Whether any other skip is a failure: in CI and in ./run-tests."""
    return os.environ.get("CI") == "true" or os.environ.get("MOETUNER_TESTS") == "strict"
