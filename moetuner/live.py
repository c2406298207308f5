"""Rows of text in a terminal that are kept up to date, or blocks of lines where there is no
cursor to move (a pipe, TERM=dumb)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

Rows = list[tuple[str, str]]  # (heading, text); a heading is empty where it repeats


def show(rows: Rows) -> None:
    for name, text in rows:
        print(f"{name:<12}{text}")


def watch(
    title: str, current: Callable[[], Rows], style: Callable[[str, str], str] = lambda *_: ""
) -> NoReturn:
    """Shows `current()` once a second until Ctrl-C. `style`: rich's, of a row's text."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def table() -> Group:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        for name, text in current():
            grid.add_row(name, Text(text, style=style(name, text)))
        return Group(Text(time.strftime(f"{title} %H:%M:%S   Ctrl-C ends"), style="dim"), grid)

    console = Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        while True:
            show(current())
            print(flush=True)
            time.sleep(1)
    with Live(table(), console=console, auto_refresh=False) as live:
        while True:
            live.update(table(), refresh=True)
            time.sleep(1)
