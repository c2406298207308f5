"""Pages of engines: found, read consistently, controlled, shown; whatever bytes they hold.

./run-tests unit -k serve_page
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetuner import cli
from moetuner.errors import MoetunerError, NotSo
from moetuner.serve import engines, page, view
from moetuner.serve.engines import Engine
from tests.support import pages

Open = Callable[..., int]


@pytest.fixture
def opened() -> Iterator[Open]:
    """`opened(data)` is a memfd with it."""
    fds: list[int] = []

    def make(data: bytes, *, sealed: bool = True) -> int:
        fds.append(pages.memfd(data, sealed=sealed))
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.support import pages
fds = [pages.memfd(open(name, "rb").read()) for name in sys.argv[2:]]
child = os.fork()  # a child has them too
if child == 0:
    sys.stdin.read()
    os._exit(0)
for fd in fds:
    if os.pread(fd, 4, 64) == b"CHLD":  # made by the child
        os.pwrite(fd, child.to_bytes(4, "little"), 64)
print(os.getpid(), flush=True)
sys.stdin.read()
os.wait()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`hold(data, …)`: another process, and a child of it, have pages with it; its pid."""
    running: list[subprocess.Popen[str]] = []

    def run(*pages: bytes) -> int:
        files = []
        for index, data in enumerate(pages):
            files.append(tmp_path / f"{len(running)}-{index}.page")
            files[-1].write_bytes(data)
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(root), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield run
    for process in running:
        process.communicate()


def test_figures(opened: Open) -> None:
    data = pages.page(
        {"sequence": 4, "state": 1, "hits": 7, "experts": 64, "trace_errno": 28},
        layers=((3, 1, 2, 3, 4, 5, 6, 7), (9, 0, 0, 0, 0, 0, 0, 2**64 - 1)),
        latency={0: 5, 23: 6},
        trace_file=b"/tmp/trace",
        pid=77,
    )
    snapshot = engines.read(opened(data))
    assert snapshot.identity == page.Identity(77, 1.7e9, "abc1234", "/models/some.gguf")
    figures = snapshot.figures
    assert (figures.state, figures.hits, figures.experts, figures.trace_errno) == (1, 7, 64, 28)
    assert figures.latency == (5, *[0] * 22, 6)
    assert figures.trace_file == "/tmp/trace"
    assert snapshot.layers[0] == page.Layer(3, 1, 2, 3, 4, 5, 6, 7)
    assert snapshot.layers[1].evictions == 2**64 - 1
    assert snapshot.control == page.Control(0, 0, 0, 0, 0, b"")


def test_every_figure_has_its_place() -> None:
    names = [field.name for field in dataclasses.fields(page.Figures)]
    for name, offset in pages.FIGURES.items():
        if name != "sequence":
            assert names.index(name) == offset // 8 - 1, name


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too short"),
        (b"moetuner", "too short"),
        (bytes(8192), "still being made"),
        (b"GGUF" + bytes(8192), "not a page"),
        (pages.page(version=2), "version 2"),
        (pages.page()[:-1], "too short"),
    ],
)
def test_what_is_no_page(opened: Open, data: bytes, why: str) -> None:
    with pytest.raises(NotSo, match=why):
        engines.read(opened(data))
    with pytest.raises(NotSo, match=why):
        engines.write(opened(data), depth=1)


def test_a_page_that_may_shrink_and_an_ordinary_file_are_refused(
    opened: Open, tmp_path: Path
) -> None:
    with pytest.raises(NotSo, match="still being made"):
        engines.read(opened(pages.page(), sealed=False))
    path = tmp_path / "page"
    path.write_bytes(pages.page())
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(NotSo, match="not a page"):
        engines.read(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (12, 0),  # bytes of the page
        (12, 4096 + 63),
        (12, 2**20 + 1),
        (12, 2**32 - 1),
        (16, 63),  # identity: over the header
        (20, 959),
        (24, 2**32 - 1),  # control
        (28, 1023),
        (32, 4096),  # figures: beyond the end
        (36, 1663),
        (36, 2**32 - 1),
        (40, 4097),  # layers
        (44, 63),
        (48, 63),  # bytes of a row
        (52, 2),  # rows
        (52, 2**32 - 1),
    ],
)
def test_a_header_that_makes_no_sense(opened: Open, offset: int, value: int) -> None:
    data = bytearray(pages.page() + bytes(2**20))  # there are enough bytes
    page.header(bytes(data))
    data[offset : offset + 4] = value.to_bytes(4, "little")
    with pytest.raises(NotSo, match="makes no sense"):
        page.header(bytes(data))
    fd = opened(bytes(data))
    with pytest.raises(NotSo, match="makes no sense"):
        engines.write(fd, depth=1)
    assert os.pread(fd, len(data), 0) == data


def test_longer_parts_of_a_later_release(opened: Open) -> None:
    """Rows of 80 bytes, and all parts larger and in other places."""
    old = pages.page({"state": 1, "hits": 5}, layers=((3, 5, 0, 0, 0, 0, 0, 0),) * 2)
    data = bytearray(16384)
    data[:64] = old[:64]
    starts = (4096, 6000, 8192, 12288)
    for index, (start, size) in enumerate(zip(starts, (1000, 1100, 3000, 400), strict=True)):
        data[16 + 8 * index : 24 + 8 * index] = start.to_bytes(4, "little") + size.to_bytes(
            4, "little"
        )
    data[12:16] = len(data).to_bytes(4, "little")
    data[48:52] = (80).to_bytes(4, "little")
    data[4096 : 4096 + 960] = old[64:1024]
    data[8192 : 8192 + 2048] = old[2048:4096]
    data[12288 : 12288 + 64] = data[12368 : 12368 + 64] = old[4096:4160]
    snapshot = engines.read(opened(bytes(data)))
    assert snapshot.identity.model == "/models/some.gguf"
    assert (snapshot.figures.hits, [row.layer for row in snapshot.layers]) == (5, [3, 3])


def test_a_writer_that_died_in_the_middle_is_told(opened: Open) -> None:
    fd = opened(pages.page({"sequence": 7}))
    with pytest.raises(NotSo, match="in the middle of an update"):
        engines.read(fd, patience_s=0.01)


def test_a_page_that_is_being_written_is_read_again(opened: Open) -> None:
    """Each publication holds one number; none is ever seen beside another's."""
    fd = opened(pages.page({"sequence": 0}, layers=((0,) * 8,) * 30))
    over = threading.Event()

    def publish() -> None:
        for number in range(1, 400):
            words = number.to_bytes(8, "little")
            os.pwrite(fd, (2 * number - 1).to_bytes(8, "little"), 2048)
            os.pwrite(fd, words * 70, 2056)
            time.sleep(0)
            os.pwrite(fd, words * 8 * 30, 4096)
            os.pwrite(fd, (2 * number).to_bytes(8, "little"), 2048)
            time.sleep(0.0002)
        over.set()

    writer = threading.Thread(target=publish)
    writer.start()
    seen = set()
    while not over.is_set():
        snapshot = engines.read(fd, patience_s=60)
        numbers = {snapshot.figures.state, snapshot.figures.experts}
        numbers |= {value for row in snapshot.layers for value in dataclasses.astuple(row)}
        assert len(numbers) == 1
        seen |= numbers
    writer.join()
    assert len(seen) > 1


def test_wishes(opened: Open) -> None:
    fd = opened(pages.page())
    before = os.pread(fd, 8192, 0)
    assert engines.write(fd, depth=5) == 2
    assert engines.write(fd, threads=3) == 4
    assert engines.write(fd, trace=b"/tmp/t") == 6
    assert engines.read(fd).control == page.Control(6, 5, 3, 1, 1, b"/tmp/t")
    assert engines.write(fd, trace=b"", depth=0) == 8
    assert engines.read(fd).control == page.Control(8, 0, 3, 2, 0, b"")
    after = os.pread(fd, 8192, 0)
    assert (after[:1024], after[2048:]) == (before[:1024], before[2048:])


def test_wishes_after_one_who_died_while_writing(opened: Open) -> None:
    fd = opened(pages.page())
    os.pwrite(fd, (2**32 - 1).to_bytes(4, "little"), 1024)
    assert engines.write(fd, depth=5) == 0
    assert engines.read(fd).control.depth == 5


def test_one_controls_at_a_time(opened: Open) -> None:
    fd = opened(pages.page())
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(NotSo, match="someone else"):
        engines.write(fd, depth=5, patience_s=0.03)
    assert os.pread(fd, 1024, 1024) == bytes(1024)
    os.close(other)
    engines.write(fd, depth=5)


def test_found_once_with_its_maker(hold: Callable[..., int]) -> None:
    """Of the processes that have a page open it is the one whose pid the page has."""
    children = int.from_bytes(b"CHLD", "little")
    pid = hold(pages.page({"hits": 1}), pages.page({"hits": 2}, pid=children))
    (mine,) = [found for found in engines.find() if found.pid == pid]
    assert mine.read().figures.hits == 1
    assert mine.name.startswith("python")
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    (other,) = [found for found in engines.find() if str(found.pid) in text.split()]
    assert other.read().figures.hits == 2
    assert other.read().identity.pid == other.pid


def test_an_engine_that_is_gone(hold: Callable[..., int], opened: Open) -> None:
    engine = Engine(1, "x", Path("/proc/2147483647/fd/0"), (0, 0))
    with pytest.raises(NotSo, match="gone"):
        engine.read()
    # Another file has the number by now.
    fd = opened(pages.page())
    with pytest.raises(NotSo, match="gone"):
        Engine(1, "x", Path(f"/proc/self/fd/{fd}"), (0, 0)).read()


def test_links_that_lie_are_not_touched(tmp_path: Path) -> None:
    """Called as a page is, but no memfd: not even stat(2) is asked of it."""
    fd = pages.memfd(pages.page())
    info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    for pid, text in (("7", "mnt_id:\t4711\n"), ("8", "pos:\t0\n"), ("9", "")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fdinfo").mkdir()
        for number, kind in (("3", info), ("4", text)):
            (tmp_path / pid / "fd" / number).symlink_to(engines.LINK)
            (tmp_path / pid / "fdinfo" / number).write_text(kind)
        (tmp_path / pid / "fd" / "5").symlink_to("/memfd:other (deleted)")
        (tmp_path / pid / "fdinfo" / "5").write_text(info)
    (tmp_path / "10").mkdir()
    (tmp_path / "self").mkdir()
    looked = []

    def stat(path: Path) -> os.stat_result:
        looked.append(str(path.relative_to(tmp_path)))
        raise OSError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert engines.find(tmp_path) == []
    assert looked == ["7/fd/3", "8/fd/3", "9/fd/3"]
    os.close(fd)


# What people see.


def _engine(name: str = "llama-server") -> Engine:
    return Engine(2213, name, Path("/proc/2213/fd/9"), (1, 2))


def _snapshot(fd: int) -> engines.Snapshot:
    return engines.read(fd)


def test_rows(opened: Open) -> None:
    data = pages.page(
        {
            "state": 1,
            "hits": 930,
            "joined": 20,
            "misses": 50,
            "bytes": 5 << 20,
            "reads": 40,
            "tokens": 12,
            "evaluations": 10,
            "depth": 32,
            "threads": 3,
            "threads_given": 4,
            "arena_bytes": 2 << 30,
            "locked_bytes": 2 << 30,
            "slots": 410,
            "used_slots": 400,
            "units": 1664,
            "waits": 3,
            "wait_ns": 1_500_000_000,
            "trace_state": 1,
            "trace_rows": 99,
        },
        latency={9: 38, 12: 2},
        trace_file=b"/tmp/t",
    )
    shown = dict(view.rows(_engine(), _snapshot(opened(data))))
    assert shown["engine"] == "pid 2213 llama-server: running"
    assert shown["cache"].startswith("2048 MiB, locked: 400 of 410 slots used, 1664 experts")
    assert shown["found"].startswith("93.0 % of 1000 experts asked for, 50 had to be read")
    assert shown["read"] == (
        "5.0 MiB in 40 reads, at most 32 at once, half below 1.0 ms, 99 % below 8.2 ms"
    )
    assert shown["waited"].startswith("1.5 s in 3 waits")
    assert shown["threads"] == "3 of -t 4"
    assert shown["trace"] == "99 rows to /tmp/t"


def test_rates(opened: Open) -> None:
    def figures(**values: int) -> page.Figures:
        return _snapshot(opened(pages.page({"state": 1, **values}))).figures

    early = figures(published_ns=10**9, tokens=10, hits=100, misses=0, bytes=0)
    late = figures(published_ns=3 * 10**9, tokens=20, hits=160, misses=40, bytes=2 << 30)
    snapshot = dataclasses.replace(_snapshot(opened(pages.page())), figures=late)
    assert dict(view.rows(_engine(), snapshot, early))["now"] == (
        "5.0 tokens/s, 60.0 % found, 1024 MiB/s read"
    )
    assert dict(view.rows(_engine(), snapshot, late))["now"] == "idle"


def test_a_broken_trace_says_why(opened: Open) -> None:
    figures = {"trace_state": 2, "trace_errno": errno.ENOSPC}
    begun = _snapshot(opened(pages.page(figures, trace_file=b"/tmp/t")))
    assert dict(view.rows(_engine(), begun))["trace"] == "ended: /tmp/t No space left on device"
    odd = _snapshot(opened(pages.page({**figures, "trace_errno": 2**64 - 1})))
    assert dict(view.rows(_engine(), odd))["trace"] == "not begun: unknown reason"
    never = _snapshot(opened(pages.page(figures)))
    assert dict(view.rows(_engine(), never))["trace"] == "not begun: No space left on device"


HOSTILE = "\x1b]0;x\x07\n\u202e\x9b31m"


@pytest.mark.parametrize("state", [1, 2])
def test_hostile_names_do_not_reach_the_terminal(opened: Open, state: int) -> None:
    data = pages.page(
        {"trace_state": state}, model=HOSTILE.encode() + b"\xff\xfe", trace_file=HOSTILE.encode()
    )
    lines = view.rows(_engine(HOSTILE), _snapshot(opened(data)))
    lines += view.rows(_engine(HOSTILE), NotSo(HOSTILE))
    assert all(text.isprintable() for _, text in lines)


def test_commands(
    hold: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pid = hold(pages.page({"state": 1, "hits": 3, "applied": 2}), pages.page(version=9))
    assert cli.main(["engine", "status", "--pid", str(pid)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(rf"^engine +pid {pid} python\S*: ", shown, re.MULTILINE)) == 2
    assert "version 9" in shown
    assert cli.main(["engine", "status", "--json", "--pid", str(pid)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted("error" in entry for entry in listed) == [False, True]
    (good,) = [entry for entry in listed if "error" not in entry]
    assert (good["hits"], good["state"], good["layers"][0]["layer"]) == (3, "running", 0)
    assert cli.main(["engine", "set", "--pid", str(pid), "--depth", "4"]) == 1
    assert "version 9" in capsys.readouterr().err


def test_set(
    hold: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "OBEDIENCE_S", 0.0)
    obedient = hold(pages.page({"applied": 2, "depth": 4, "depth_max": 9, "threads": 2}))
    lazy = hold(pages.page())
    command = ["engine", "set", "--depth", "4"]
    assert cli.main([*command, "--pid", str(obedient)]) == 0
    assert "4 reads at once (at most 9), 2 threads of -t 0" in capsys.readouterr().out
    assert cli.main([*command, "--pid", str(lazy), "--trace", "t"]) == 0
    assert "it takes effect with the next token" in capsys.readouterr().out
    (engine,) = [engine for engine in engines.find() if engine.pid == lazy]
    control = engine.read().control
    assert (control.depth, control.trace_on) == (4, 1)
    assert control.trace_file == os.fsencode(os.path.abspath("t"))
    assert cli.main(command) == 2
    assert re.search(rf"--pid says which \(.*{obedient}.*\)", capsys.readouterr().err)


def test_a_trace_that_did_not_begin_is_a_failure(
    hold: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"applied": 2, "trace_state": 2, "trace_errno": errno.EACCES}
    pid = hold(pages.page(figures))
    assert cli.main(["engine", "set", "--pid", str(pid), "--trace", "/no/such"]) == 1
    assert "does not record: not begun: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("engine", 2, r"moetuner: .*required: COMMAND \(moetuner engine --help\)"),
        ("engine fly", 2, r"moetuner: .*invalid choice: 'fly'.*\(moetuner engine --help\)"),
        ("engine set", 2, r"moetuner: nothing to set: .* \(moetuner engine set --help\)"),
        ("engine set --depth -1", 2, r"moetuner: argument --depth: .*"),
        ("engine set --depth ٣", 2, r"moetuner: argument --depth: a whole number .*"),
        ("engine set --threads 9999999", 2, r"moetuner: argument --threads: a whole number .*"),
        ("engine set --trace " + 1000 * "x", 2, r"moetuner: --trace: a file name of at most .*"),
        ("engine set --depth 1 --pid 2147", 1, r"moetuner: process 2147 runs no engine .*"),
        ("engine status --pid 2147", 1, r"moetuner: process 2147 runs no engine .*"),
        ("engine status --json --watch", 2, r"moetuner: .*not allowed with.*"),
    ],
)
def test_arguments(
    arguments: str,
    code: int,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engines, "find", list)
    assert cli.main(arguments.split()) == code
    assert re.fullmatch(error + "\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["status", "set"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["engine", command, "--help"])
    assert f"  moetuner engine {command}" in capsys.readouterr().out


def test_watch_in_a_pipe(hold: Callable[..., int]) -> None:
    pid = hold(pages.page({"state": 1}))
    command = [sys.executable, "-u", "-m", "moetuner", "engine", "status", "--watch"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, "--pid", str(pid)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(12)]
        process.kill()
    assert lines[0].startswith(f"engine      pid {pid} python")
    assert lines[1] == "now         idle\n"


# Whatever the bytes are.


@given(data=st.binary(max_size=6000))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    for decode in (page.header, page.identity, page.control, page.sequence, page.figures):
        try:
            decode(data)
        except MoetunerError:
            continue


@given(
    changes=st.lists(st.tuples(st.integers(0, 4223), st.binary(min_size=1, max_size=8))),
    layers=st.integers(0, 2),
)
@settings(deadline=None, max_examples=200)
def test_any_page_is_shown_or_refused(changes: list[tuple[int, bytes]], layers: int) -> None:
    data = bytearray(pages.page({"state": 1, "hits": 5}, layers=((0,) * 8,) * layers))
    for offset, part in changes:
        if offset + len(part) <= len(data):
            data[offset : offset + len(part)] = part
    fd = pages.memfd(bytes(data))
    try:
        snapshot = engines.read(fd, patience_s=0)
        assert all(text.isprintable() for _, text in view.rows(_engine(), snapshot))
        assert all(
            text.isprintable()
            for _, text in view.rows(
                _engine(), snapshot, dataclasses.replace(snapshot.figures, published_ns=0)
            )
        )
        engines.write(fd, depth=1, threads=2, trace=b"x", patience_s=0)
    except MoetunerError:
        pass
    finally:
        os.close(fd)
