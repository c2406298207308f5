"""moetuner as an ordinary user runs it: see the fixture public."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.boards import Board

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


class Public:
    """The program in a directory that every user may read, and boards in plain files.

    The checkout, pytest's directories and the environment may be root's alone. Run by an
    ordinary user, the commands run as that user.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o755)
        ignored = shutil.ignore_patterns("__pycache__", "demo")
        for name in ("moetuner", "probes"):
            shutil.copytree(REPOSITORY / name, directory / name, ignore=ignored)

    def board(self, board: Board) -> Path:
        """Its root; nothing in it can be written by the user."""
        root = self.directory / board.key
        if not root.exists():
            board.write(root)
        return root

    def run(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """`moetuner ARGUMENTS…` as nobody, with nothing of the caller's environment."""
        nobody = pwd.getpwnam("nobody")
        identity: dict[str, Any] = {}
        if os.getuid() == 0:  # tests may patch geteuid
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        return subprocess.run(
            [os.path.realpath(sys.executable), "-m", "moetuner", *map(str, arguments)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"},
            **identity,
            **options,
        )
