"""The rule of tests/conftest.py: no test is skipped that this machine could run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "import pytest\nfrom tests.support.machine import cannot\n"


@pytest.mark.parametrize(
    ("source", "strict", "status"),
    [
        ("def test_x():\n    pytest.skip('not today')\n", True, 1),
        ("def test_x():\n    pytest.skip('not today')\n", False, 0),
        ("pytest.importorskip('no_such_package')\n", True, 2),
        ("@pytest.mark.skipif(True, reason='why not')\ndef test_x():\n    pass\n", True, 1),
        ("@pytest.mark.parametrize('x', [])\ndef test_x(x):\n    pass\n", True, 1),
        ("def test_x():\n    cannot('no such device')\n", True, 0),
        ("@pytest.mark.xfail\ndef test_x():\n    assert False\n", True, 0),
    ],
)
def test_a_skip_needs_a_fact_about_the_machine(
    tmp_path: Path, source: str, strict: bool, status: int
) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "false"}
    environment["MOETUNER_TESTS"] = "strict" if strict else ""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", ".", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stdout + result.stderr
