"""Log lines: for the journal, for a terminal, for nobody.

./run-tests unit -k log
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from moetuner.log import DEBUG, WARNING, StreamLog, printable


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    log = StreamLog(stream)
    log("floor 1020 MHz")
    log("detail", DEBUG)
    log("heat", WARNING)
    assert stream.getvalue() == "floor 1020 MHz\nheat\n"


def test_the_journal_gets_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "socket").open("w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        StreamLog(stream)("heat", WARNING)
        stream.seek(0)
        assert stream.read() == "<4>heat\n"


def test_a_reader_that_is_gone_and_a_full_disk_are_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        log = StreamLog(gone)
        for _ in range(3):
            log("floor 306 MHz (idle)")
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())  # so that it can be closed
    with open("/dev/full", "w") as full:
        StreamLog(full)("floor 306 MHz (idle)")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("llama-server", "llama-server"),
        ("läuft-模型", "läuft-模型"),
        ("a\nfloor 1", r"a\nfloor 1"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202egnp", r"\u202egnp"),
        ("\udcff", r"\udcff"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_text_of_others_is_one_line_that_drives_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown
