"""What the demonstration prints: steps, progress, results; colour only in a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

BAR = 24  # characters
RESET = "\x1b[0m"
STYLES = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "red": "\x1b[31m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "cyan": "\x1b[36m",
}


class Console:
    """Plain lines when piped; colour and one moving progress line in a terminal.

    Piped, a progress line appears at most every tenth of the work and every 30 s,
    so that a log of a ten-minute build stays readable.
    """

    QUIET_S = 30.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._tty = self._stream.isatty()
        self._colour = self._tty and "NO_COLOR" not in os.environ
        self._moving = False
        self._tenth = -1
        self._last = 0.0

    def style(self, text: str, name: str) -> str:
        return f"{STYLES[name]}{text}{RESET}" if self._colour and name in STYLES else text

    def line(self, text: str = "", style: str = "") -> None:
        self._clear()
        print(self.style(text, style), file=self._stream, flush=True)

    def step(self, text: str) -> None:
        self.line(f"==> {text}", "bold")

    def check(self, held: bool, text: str) -> None:
        mark = self.style("ok    ", "green") if held else self.style("FAILED", "red")
        self.line(f"  {mark}  {text}")

    def progress(self, fraction: float, text: str) -> None:
        """One state of a long step: `fraction` from 0 to 1; call it as often as you like."""
        percent = int(100 * fraction)
        if self._tty:
            full = int(BAR * fraction)
            bar = "#" * full + "." * (BAR - full)
            line = f"\r\x1b[K  [{bar}] {percent:3d} %  {text}"
            print(line, end="", file=self._stream, flush=True)
            self._moving = True
            return
        now = time.monotonic()
        if percent // 10 == self._tenth or now - self._last < self.QUIET_S:
            return
        self._tenth, self._last = percent // 10, now
        print(f"  {percent:3d} %  {text}", file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._moving:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._moving = False


def duration(seconds: float) -> str:
    """`0:42`, `12:05`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
