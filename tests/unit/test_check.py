"""`moetuner --check` tells the truth on each board, and needs no root for it.

./run-tests unit -k check
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moetuner import check, status
from moetuner.board.sysroot import SysRoot
from moetuner.check import MISSING, OK, WARNING, Finding
from moetuner.errors import MissingRequirement
from moetuner.watch import survey
from moetuner.watch.processes import Process
from tests.support.boards import ALL, ORIN_NANO_JP6, Board
from tests.support.public import Public
from tests.unit.test_status import snapshot


@pytest.fixture(autouse=True)
def ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process root is not used for what root alone may do."""
    monkeypatch.setattr("os.geteuid", lambda: 65534)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ORIN_NANO_JP6.write(tmp_path)
    return tmp_path


def find(root: Path, name: str, config: Path | None = None) -> Finding:
    (finding,) = [f for f in check.run(root, config) if f.name == name]
    return finding


@pytest.mark.parametrize("board", ALL, ids=lambda board: board.key)
def test_each_board_as_an_ordinary_user(board: Board, public: Public) -> None:
    done = public.run("check", "--json", "--root", public.board(board))
    assert done.stderr == ""
    told = json.loads(done.stdout)
    findings = {f["name"]: f for f in told["findings"]}
    assert board.model.removeprefix("NVIDIA ") in findings["board"]["text"]
    old = board.release is not None and board.release.startswith(("# R32", "# R35"))
    assert findings["board"]["state"] == (WARNING if old else OK)
    assert findings["gpu"]["state"] == OK
    lowest, highest = board.gpu_node.frequencies[0], board.gpu_node.frequencies[-1]
    for text in (board.gpu, _mhz(lowest), _mhz(highest), board.gpu_node.governor):
        assert text in findings["gpu"]["text"]
    assert findings["eBPF"]["state"] == WARNING and "sudo" in findings["eBPF"]["todo"]
    assert findings["daemon"]["state"] == WARNING
    # The exit code says just what the findings say.
    missing = [f for f in told["findings"] if f["state"] == MISSING]
    assert told["ready"] is (not missing)
    assert done.returncode == (1 if missing else 0)
    # On a simulated board nothing of the board is missing; of this machine, something may be.
    assert not {f["name"] for f in missing} & {"board", "gpu", "configuration", "hotplug"}


def _mhz(hz: int) -> str:
    return f"{hz / 1e6:.1f}".removesuffix(".0") + " MHz"


def test_plain_lines_say_what_to_do(public: Public) -> None:
    done = public.run("--check", "--root", public.board(ORIN_NANO_JP6))
    lines = done.stdout.splitlines()
    assert lines[0] == "ok       configuration built-in defaults"
    at = next(i for i, line in enumerate(lines) if line.startswith("warning  eBPF "))
    assert lines[at + 1] == " " * 23 + "→ sudo moetuner --check"
    assert "\x1b" not in done.stdout and done.stderr == ""


def test_it_changes_nothing(root: Path) -> None:
    def tree() -> list[tuple[str, int]]:
        return [(str(p), p.lstat().st_mtime_ns) for p in sorted(root.rglob("*"))]

    before = tree()
    check.run(root, None)
    assert tree() == before


def test_a_machine_that_is_no_jetson(tmp_path: Path) -> None:
    for name in ("sys", "proc", "run"):
        (tmp_path / name).mkdir()
    assert find(tmp_path, "board").state == WARNING
    gpu = find(tmp_path, "gpu")
    assert gpu.state == MISSING and gpu.todo
    assert check.exit_code([gpu]) == 1


def test_a_configuration_with_a_mistake(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("floor:\n  hold: 1\n  node: [x]\n")
    finding = find(root, "configuration", path)
    assert finding.state == MISSING and finding.text.startswith(f"{path}:3: floor.node: ")
    assert find(root, "gpu", path).state == OK  # everything else is looked at all the same


def test_a_frequency_that_the_gpu_does_not_have(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("floor: {frequency: 700 MHz}\n")
    finding = find(root, "gpu floor", path)
    assert finding.state == WARNING and "700 MHz is not supported" in finding.text
    assert finding.todo and "612 MHz, 714 MHz" in finding.todo


def test_a_node_that_is_not_there(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("floor: {node: no.such}\n")
    finding = find(root, "gpu", path)
    assert finding.state == MISSING and "no.such" in finding.text


def test_jetson_clocks_has_been_here(root: Path) -> None:
    node = root / "sys/class/devfreq/17000000.gpu"
    (node / "min_freq").write_text("1020000000\n")
    finding = find(root, "gpu floor")
    assert finding.state == WARNING and "nothing is left to raise" in finding.text


def test_a_node_that_cannot_be_read(root: Path) -> None:
    node = root / "sys/class/devfreq/17000000.gpu"
    (node / "min_freq").write_text("nonsense\n")
    finding = find(root, "gpu")
    assert finding.state == MISSING and "'nonsense'" in finding.text


def test_throttling(root: Path) -> None:
    (root / "sys/class/thermal/cooling_device5/cur_state").write_text("1\n")
    finding = find(root, "throttling")
    assert (finding.state, finding.text) == (WARNING, "gpu-throttle-alert 1 of 1")


def test_a_power_tool_that_runs(root: Path, tmp_path: Path) -> None:
    tool = tmp_path / "jetson_clocks"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", tool)
    process = subprocess.Popen([tool, "60"])
    try:
        finding = find(root, "power tools")
    finally:
        process.kill()
        process.wait()
    assert finding.state == WARNING
    assert f"jetson_clocks is running (pid {process.pid})" in finding.text


def test_the_power_mode(root: Path) -> None:
    path = root / "var/lib/nvpmodel/status"
    path.parent.mkdir(parents=True)
    path.write_text("pmode:0002 fmode:quiet\x1b[31m\n")
    assert find(root, "power mode").text == r"nvpmodel pmode:0002 fmode:quiet\x1b[31m"


def test_a_daemon_that_runs(root: Path) -> None:
    SysRoot(root).replace(status.PATH, json.dumps(snapshot()))
    finding = find(root, "daemon")
    assert (finding.state, finding.text) == (OK, f"runs as pid {os.getpid()} (moetuner 0.1.0)")


def test_a_status_that_is_damaged(root: Path) -> None:
    SysRoot(root).replace(status.PATH, "{")
    finding = find(root, "daemon")
    assert finding.state == WARNING and "is damaged" in finding.text


def test_a_probe_that_does_not_load(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MissingRequirement("the kernel refuses eBPF programs", "lockdown takes them away")

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(check, "load", refuse)
    finding = find(root, "eBPF")
    assert finding.state == MISSING and finding.todo == "lockdown takes them away"


def test_files_and_processes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        survey.File("/a/libllama.so", ("llama_decode", "llama_process"), None, (7, 9)),
        survey.File("/b/libllama.so", ("llama_decode",), "a jump table", ()),
        survey.File("/c/libllama.so", (), None, (8,), "cannot be examined: no section"),
    ]
    server = Process(7, 1, "a\nb", "/a/llama-server", ("s", "--cpu-moe"), {})
    monkeypatch.setattr(survey, "survey", lambda configured: (files, [server]))
    findings = check.run(root, None)
    assert [f for f in findings if f.name == "llama.cpp"] == [
        Finding("llama.cpp", OK, "/a/libllama.so (llama_decode, llama_process), pids 7, 9"),
        Finding(
            "llama.cpp",
            WARNING,
            "/b/libllama.so (llama_decode; returns by uretprobe: a jump table), not in use",
        ),
        Finding("llama.cpp", MISSING, "/c/libllama.so: cannot be examined: no section"),
    ]
    (process,) = [f for f in findings if f.name == "process"]
    assert process.text == r"pid 7 a\nb counts: --cpu-moe"


def test_a_file_that_the_configuration_names(root: Path, tmp_path: Path) -> None:
    library = tmp_path / "libllama.so"
    source = "int llama_decode(void) { return 0; }\nint llama_synchronize(void) { return 1; }\n"
    compiler = shutil.which("cc")
    assert compiler
    command = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    path = tmp_path / "x.yaml"
    path.write_text(f"watch: {{libraries: ['{tmp_path}/libllama*']}}\n")
    findings = check.run(root, path)
    assert f"{library} (llama_decode, llama_synchronize), not in use" in [
        finding.text for finding in findings
    ]
