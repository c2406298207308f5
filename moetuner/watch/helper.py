"""How the helpers (loader, inspector) are started: this Python, this package, nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypedDict

import moetuner

PACKAGE_PARENT = Path(moetuner.__file__).resolve().parent.parent


class Surroundings(TypedDict):
    """Keyword arguments of subprocess.Popen."""

    cwd: Path
    env: dict[str, str]


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def surroundings() -> Surroundings:
    """`-m` imports from the working directory first, and that may be anyone's: so it is ours."""
    return {"cwd": PACKAGE_PARENT, "env": {**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)}}
