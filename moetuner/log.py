"""Log lines: for journald with a `<N>` priority prefix, for a terminal in colour.

One line per state change. Text that comes from a process (its name, its command
line) goes through `printable` first: it must not forge lines or drive the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Protocol, TextIO

# syslog(3) priorities
ERROR, WARNING, NOTICE, INFO, DEBUG = 3, 4, 5, 6, 7
_COLOUR = {ERROR: "\x1b[31m", WARNING: "\x1b[33m", NOTICE: "\x1b[1m", DEBUG: "\x1b[2m"}


class Log(Protocol):
    """Where messages go; `priority` is one of syslog's."""

    def __call__(self, message: str, priority: int = INFO) -> None: ...


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line: control and bidirectional characters as escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


class StreamLog:
    """Writes to a stream; the `<N>` prefix if it leads to the journal."""

    def __init__(self, stream: TextIO | None = None, level: int = INFO) -> None:
        self._stream = stream or sys.stderr
        self._level = level
        self._journal = is_journal(self._stream)
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, message: str, priority: int = INFO) -> None:
        if priority > self._level:
            return
        if self._journal:
            line = f"<{priority}>{message}"
        elif self._colour and priority in _COLOUR:
            line = f"{_COLOUR[priority]}{message}\x1b[0m"
        else:
            line = message
        # Whoever reads the log may be gone (`moetuner daemon 2>&1 | head`) and a disk full:
        # what the line tells of has to go on all the same.
        with contextlib.suppress(OSError):
            print(line, file=self._stream, flush=True)


def is_journal(stream: TextIO) -> bool:
    """Whether `stream` is the journal socket that systemd names in JOURNAL_STREAM (DEV:INODE)."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"
