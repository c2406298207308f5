"""Arguments → command; error → exit code."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import moetuner
from moetuner import config
from moetuner.errors import MoetunerError, UsageError, reason
from moetuner.serve import arguments as engine_arguments

EXIT_CODES = """\
exit codes:
  0  done
  1  the thing asked for is not so (a check fails, no daemon runs)
  2  usage or configuration
  3  a requirement is missing (root, eBPF, kernel headers, a package)
  4  unexpected failure
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message, f"{self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, where a reader that is gone can still be told from success
        super().exit(status, message)


def parser() -> argparse.ArgumentParser:
    """The command line, as --help, the man page and the completion have it."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="take /sys and /run of the board below DIR (a simulated board)",
    )
    configured = _Parser(add_help=False)
    configured.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration file (default {config.DEFAULT_PATH}; built-in defaults without one)",
    )
    main_parser = _Parser(
        prog="moetuner",
        description="Runs Mixture-of-Experts models larger than memory fast on Jetson boards: "
        "holds the GPU's clock up only while llama.cpp infers with experts on the CPU.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument(
        "--version", action="version", version=f"moetuner {moetuner.__version__}"
    )
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(
        name: str, summary: str, example: str, *parents: _Parser
    ) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common, *parents],
        )

    check = command(
        "check",
        "tell whether this machine is ready, and what to do if not (also: moetuner --check)",
        "moetuner check --json | jq '.findings[] | select(.state != \"ok\")'",
        configured,
    )
    check.add_argument("--json", action="store_true", help="for scripts")
    daemon = command(
        "daemon",
        "watch llama.cpp and hold the GPU's floor while it infers (systemd runs this)",
        "sudo moetuner daemon --config /etc/moetuner/moetuner.yaml",
        configured,
    )
    daemon.add_argument("--verbose", action="store_true", help="log details too")
    status = command("status", "show what the running daemon does", "moetuner status --watch")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the daemon's status.json")
    form.add_argument("--watch", action="store_true", help="keep showing, once a second")
    summary = "show and control the expert caches of running llama.cpp processes"
    engine = commands.add_parser(
        "engine",
        help=summary,
        description=summary,
        epilog=f"example:\n  moetuner engine status --watch\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engine_arguments.add(engine, EXIT_CODES)
    command(
        "restore",
        "put min_freq back to what a daemon that was killed had found (ExecStopPost does this)",
        "sudo moetuner restore",
    )
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. Nothing that a user can cause ends in a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--check"]:
        given[0] = "check"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # `→` where the locale has none
    try:
        options = parser().parse_args(given)
        if options.command is None:
            parser().print_help()
            return 2
        code = _run(options)
        sys.stdout.flush()
        return code
    except MoetunerError as error:
        print(f"moetuner: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `moetuner status | head`: nobody reads on, and that is fine.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        print(f"moetuner: unexpected failure:{name} {reason(error)}", file=sys.stderr)
        return 4
    except Exception as error:
        print(f"moetuner: unexpected failure: {type(error).__name__}: {error}", file=sys.stderr)
        print("This is a defect of moetuner; please report it with these lines:", file=sys.stderr)
        for line in traceback.format_tb(error.__traceback__)[-3:]:
            print(line.rstrip(), file=sys.stderr)
        return 4


def _run(options: argparse.Namespace) -> int:
    if options.command == "engine":
        from moetuner import live
        from moetuner.serve import view

        return view.run(options, live)
    try:
        os.listdir(options.root)
    except OSError as error:
        raise UsageError(f"--root {options.root}: {reason(error)}") from error
    # Each command imports what it needs: the daemon's memory and the speed of --help.
    if options.command == "check":
        return _check(options)
    if options.command == "daemon":
        return _daemon(options)
    if options.command == "status":
        return _status(options)
    return _restore(options)


def _daemon(options: argparse.Namespace) -> int:
    from moetuner.daemon import Daemon, Options
    from moetuner.log import DEBUG, INFO, StreamLog

    log = StreamLog(level=DEBUG if options.verbose else INFO)
    Daemon(
        Options(options.root, options.config or config.DEFAULT_PATH, options.config is None), log
    ).run()
    return 0


def _check(options: argparse.Namespace) -> int:
    from moetuner import check

    findings = check.run(options.root, options.config)
    if options.json:
        json.dump(check.as_json(findings), sys.stdout, indent=1)
        print()
    else:
        check.show(findings)
    return check.exit_code(findings)


def _status(options: argparse.Namespace) -> int:
    from moetuner import status, statusview
    from moetuner.board.sysroot import SysRoot

    root = SysRoot(options.root)
    if options.watch:
        statusview.watch(root)
        return 0
    snapshot = status.read(root)
    if options.json:
        json.dump(snapshot, sys.stdout, indent=1)
        print()
    else:
        statusview.show(snapshot, root)
    return 0


def _restore(options: argparse.Namespace) -> int:
    from moetuner import status
    from moetuner.board.baseline import BaselineFile, Outcome, recover
    from moetuner.board.instance import nobody_alive
    from moetuner.board.sysroot import SysRoot
    from moetuner.log import StreamLog

    root = SysRoot(options.root)
    with nobody_alive(root):  # a running daemon puts back what it raised itself
        recovery = recover(root, BaselineFile(root))
        status.Writer(root).remove()  # a killed one's
    if recovery.text:
        StreamLog()(recovery.text, recovery.priority)
    else:
        print(recovery.outcome.value)
    return 4 if recovery.outcome is Outcome.FAILED else 0
