"""The arguments of `moetuner engine`."""

from __future__ import annotations

import argparse

MOST = 1 << 20  # what anyone could mean; the engine keeps to what it can do


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to {MOST}, not {text!r}")
    return int(text)


def add(engine: argparse.ArgumentParser, epilog: str) -> None:
    """Adds the subcommands; `epilog` ends the help of each."""
    commands = engine.add_subparsers(dest="engine_command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, examples: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n{examples}\n\n{epilog}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            "--pid", type=_number, metavar="N", help="the engine in this process only"
        )
        return parser

    status = command(
        "status",
        "show what the expert caches of running llama.cpp processes do",
        "  moetuner engine status --watch",
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all figures, those of layers too")
    form.add_argument("--watch", action="store_true", help="keep showing, once a second")
    control = command(
        "set",
        "change how a running engine works, from its next operation on",
        "  moetuner engine set --depth 16 --threads 4\n"
        "  moetuner engine set --pid 2213 --trace router.trace",
    )
    control.add_argument(
        "--depth", type=_number, metavar="N", help="reads under way at once; 0: as at its start"
    )
    control.add_argument(
        "--threads",
        type=_number,
        metavar="N",
        help="threads that compute experts; 0: as many as llama.cpp's -t",
    )
    control.add_argument(
        "--trace",
        metavar="FILE|off",
        help="record the router's choices to a new FILE (never over an old one), or stop it",
    )
