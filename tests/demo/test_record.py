"""What the demonstration records, and how it puts it on one time line."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from moetuner.demo.board import Board
from moetuner.demo.console import Console, duration
from moetuner.demo.record import (
    Change,
    JournalLine,
    Recorder,
    Window,
    delay_of,
    others,
    starts,
    time_line,
)
from moetuner.demo.show import Check, Outcome, Stage
from moetuner.demo.witness import Call, parse_line

LOW, HIGH = 306_000_000, 1_020_000_000


def _call(at: float, function: str = "llama_process") -> Call:
    return Call(at, 7, function)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        (
            "    llama-server-4711    [001] .....  1234.567890: llama_process: (0x7f12)",
            Call(1234.56789, 4711, "llama_process"),
        ),
        (
            " my tool-x-12      [000] d..1. 9.000001: llama_decode: (0x1)",
            Call(9.000001, 12, "llama_decode"),
        ),
        ("CPU:1 [LOST 12 EVENTS]", None),
        ("# tracer: nop", None),
        ("", None),
    ],
)
def test_lines_of_trace_pipe(line: str, call: Call | None) -> None:
    assert parse_line(line) == call


def test_a_pause_makes_the_next_call_a_first_one() -> None:
    calls = tuple(_call(at) for at in (1.0, 1.1, 1.9, 3.0, 3.1))
    assert [call.at for call in starts(calls)] == [1.0, 3.0]


def test_a_raise_counts_from_the_first_call_and_a_fall_from_the_last() -> None:
    calls = (_call(1.0), _call(1.5), _call(2.0))
    assert delay_of(Change(1.0005, LOW, HIGH), calls) == pytest.approx(0.0005)
    assert delay_of(Change(3.0, HIGH, LOW), calls) == pytest.approx(1.0)
    assert delay_of(Change(0.5, LOW, HIGH), calls) is None


def test_the_time_line_is_in_order_and_says_the_delays() -> None:
    window = Window(
        calls=(_call(1.0), _call(1.2, "llama_synchronize")),
        changes=(Change(1.0004, LOW, HIGH), Change(2.2, HIGH, LOW)),
        journal=(JournalLine(1.0004, "floor 1020 MHz"), JournalLine(2.2, "floor 306 MHz (idle)")),
    )
    assert [(entry.kind, entry.text) for entry in time_line(window)] == [
        ("call", "first llama_process after a pause (thread 7)"),
        ("min_freq", "306 → 1020 MHz, 0.40 ms after the first call"),
        ("journal", "floor 1020 MHz"),
        ("call", "llama_synchronize, the last of 2"),
        ("min_freq", "1020 → 306 MHz, 1.000 s after the last call"),
        ("journal", "floor 306 MHz (idle)"),
    ]


def test_other_processes_that_count_are_told_apart() -> None:
    lines = (
        JournalLine(1, "pid 7 llama-server keeps experts on the CPU: --cpu-moe"),
        JournalLine(2, "pid 8 llama server keeps experts on the CPU: -ncmoe 3"),
        JournalLine(3, "pid 9 llama-server does not count: no flag keeps experts on the CPU"),
    )
    assert others(lines, frozenset({7})) == [lines[1].text]


def test_changes_and_journal_lines_are_recorded(simulated_board: Board, tmp_path: Path) -> None:
    journal = tmp_path / "daemon.log"
    recorder = Recorder(simulated_board, journal)
    recorder.start()
    try:
        simulated_board.min_freq.write_text(f"{HIGH}\n")
        with journal.open("a") as file:
            print("floor 1020 MHz (pid 1 x inference)", file=file, flush=True)
            file.write("half a line")
        _await_changes(recorder, 1)
        assert not recorder.wait_until_low(0.05)
        simulated_board.min_freq.write_text(f"{HIGH}\n")  # the same again: no change
        simulated_board.min_freq.write_text(f"{LOW}\n")
        _await_changes(recorder, 2)
        assert recorder.wait_until_low(5)
        recorder.heard(_call(time.monotonic()))
        window = recorder.since(0)
    finally:
        recorder.stop()
    assert [(change.before, change.after) for change in window.changes] == [
        (LOW, HIGH),
        (HIGH, LOW),
    ]
    assert [line.text for line in window.journal] == ["floor 1020 MHz (pid 1 x inference)"]
    assert len(window.calls) == 1
    assert recorder.since(time.monotonic()).changes == ()


def _await_changes(recorder: Recorder, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(recorder.since(0).changes) < count or not recorder.since(0).journal:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _Played:
    """A recorder that answers with a prepared window."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def since(self, begin: float) -> Window:
        return self.window


@pytest.mark.parametrize(
    ("changes", "held"), [((), True), ((Change(1.0, LOW, HIGH), Change(2.0, HIGH, LOW)), False)]
)
def test_a_floor_that_moves_while_idle_is_a_failure(
    simulated_board: Board, changes: tuple[Change, ...], held: bool
) -> None:
    played = _Played(Window(calls=(), changes=changes, journal=()))
    output = io.StringIO()
    stage = Stage(Console(output), simulated_board, played, True)  # type: ignore[arg-type]
    stage.idle(0.0)
    assert stage.outcome.good is held
    assert ("FAILED" in output.getvalue()) is not held


def test_slow_raises_are_a_failure(simulated_board: Board) -> None:
    stage = Stage(Console(io.StringIO()), simulated_board, _Played(Window((), (), ())), True)  # type: ignore[arg-type]
    stage.outcome.raises_s += [0.0004, 0.1, 0.1]
    stage.raise_delay()
    assert not stage.outcome.good


def test_nothing_checked_is_not_good() -> None:
    assert not Outcome().good
    assert Outcome(checks=[Check(True, "x")]).good
    assert not Outcome(checks=[Check(True, "x"), Check(False, "y")]).good


def test_piped_progress_is_sparse_and_plain() -> None:
    output = io.StringIO()
    console = Console(output)
    console.line("begin", "bold")
    for step in range(1000):
        console.progress(step / 1000, "x")
    console.check(False, "it holds")
    lines = output.getvalue().splitlines()
    assert lines[0] == "begin"
    assert lines[-1] == "  FAILED  it holds"
    assert len(lines) <= 3
    assert "\x1b" not in output.getvalue() and "\r" not in output.getvalue()


def test_a_terminal_gets_one_moving_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    console = Console(output)
    console.progress(0.5, "half")
    console.progress(0.6, "more")
    console.line("done")
    assert "\n" not in output.getvalue().split("more")[0]
    assert output.getvalue().endswith("\r\x1b[K" + "done\n")


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "0:04"), (725, "12:05"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
