"""The demonstration's processes: how they end and what is said when they fail."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moetuner.demo.services import Answer, Daemon, LlamaServer, Service
from moetuner.demo.witness import Call, Witness, file_offset
from moetuner.errors import MissingRequirement, SystemRefused


def test_a_service_stops_on_sigterm(tmp_path: Path) -> None:
    service = Service("x", ["sleep", "100"], tmp_path / "log")
    assert service.running()
    assert service.stop() == -15
    assert service.stop() == -15  # again is harmless
    assert not service.running()


def test_one_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetuner.demo.services.STOP_S", 0.1)
    script = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    service = Service("x", [sys.executable, "-c", f"{script}time.sleep(100)"], tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert service.stop() == -9


def test_a_failure_says_how_it_ended_and_the_last_lines(tmp_path: Path) -> None:
    service = Service("x", ["sh", "-c", "echo bad model; kill -KILL $$"], tmp_path / "log")
    while service.running():
        time.sleep(0.01)
    text = str(service.failure("did not start"))
    assert "x did not start (ended by SIGKILL)" in text
    assert "bad model" in text


def _stand_in(directory: Path, source: str) -> None:
    """A package `moetuner` whose daemon is `source`."""
    package = directory / "moetuner"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(source)


def test_the_daemon_is_awaited_until_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(
        tmp_path,
        "import os, socket, sys, time\n"
        "assert sys.argv[1:] == ['daemon', '--root', sys.argv[3], '--config', sys.argv[5]]\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.sendto(b'STATUS=compiling', os.environ['NOTIFY_SOCKET'])\n"
        "s.sendto(b'READY=1\\nSTATUS=x', os.environ['NOTIFY_SOCKET'])\n"
        "time.sleep(100)\n",
    )
    monkeypatch.setattr(
        "moetuner.demo.services._package_environment", lambda: {"PYTHONPATH": str(tmp_path)}
    )
    monkeypatch.chdir(tmp_path)
    daemon = Daemon(tmp_path / "board", tmp_path / "c.yaml", tmp_path / "log")
    assert daemon.running()
    assert not (tmp_path / "notify").exists()
    assert daemon.stop() == -15


def test_a_daemon_that_ends_at_once_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(tmp_path, "raise SystemExit('moetuner: kernel headers are missing')\n")
    monkeypatch.setattr(
        "moetuner.demo.services._package_environment", lambda: {"PYTHONPATH": str(tmp_path)}
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemRefused, match="kernel headers are missing") as caught:
        Daemon(tmp_path / "board", tmp_path / "c.yaml", tmp_path / "log")
    assert "ended with status 1" in str(caught.value)


class _Completion(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: dict[str, object] = {"error": "busy"}
        if asked["n_predict"] != 13:
            answer = {
                "content": "ba be",
                "tokens_predicted": asked["n_predict"],
                "timings": {
                    "predicted_per_second": 100.0,
                    "prompt_n": 7,
                    "prompt_per_second": 300.0,
                },
            }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        return


def test_requests_and_answers_that_make_no_sense(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Completion) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server = LlamaServer(Path("/bin/true"), Path("m.gguf"), tmp_path / "log")
        server.port = http.server_address[1]
        answer = server.complete("x", 5)
        assert answer == Answer("ba be", 5, 100.0, 7, 300.0)
        with pytest.raises(SystemRefused, match="did not answer a request"):
            server.complete("x", 13)
        http.shutdown()
        server.stop()


CALLER = """
#include <unistd.h>
int llama_decode(void) { return 1; }
int llama_synchronize(void) { return 2; }
"""
MAIN = """
int llama_decode(void); int llama_synchronize(void);
int main(void) { for (int i = 0; i < 23; i++) llama_decode(); return llama_synchronize() - 2; }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "lib.c").write_text(CALLER)
    (tmp_path / "main.c").write_text(MAIN)
    path = tmp_path / "libcalled.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "lib.c"], check=True)
    main = f"cc -o main main.c libcalled.so -Wl,-rpath,{tmp_path}"
    subprocess.run(main.split(), cwd=tmp_path, check=True)
    return path


def test_the_offset_of_a_function_in_its_file(library: Path, tmp_path: Path) -> None:
    offset = file_offset(library, "llama_decode")
    assert offset is not None and 0 < offset < library.stat().st_size
    assert file_offset(library, "llama_process") is None
    assert file_offset(tmp_path / "main", "llama_decode") is None  # undefined there
    with pytest.raises(SystemRefused, match="cannot read"):
        file_offset(tmp_path / "lib.c", "llama_decode")


@pytest.mark.root
def test_the_witness_hears_every_call_on_our_clock(library: Path, tmp_path: Path) -> None:
    calls: list[Call] = []
    witness = Witness(library, calls.append)
    witness.start()
    try:
        begin = time.monotonic()
        process = subprocess.Popen([tmp_path / "main"])
        assert process.wait() == 0
        end = time.monotonic()
        deadline = end + 20
        while len(calls) < 24 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        witness.stop()
    assert [call.function for call in calls] == ["llama_decode"] * 23 + ["llama_synchronize"]
    assert {call.thread for call in calls} == {process.pid}
    assert all(begin <= call.at <= end for call in calls)
    assert not witness.lost


@pytest.mark.root
def test_the_witness_leaves_nothing_behind(library: Path, tmp_path: Path) -> None:
    before = Path("/proc/self/mounts").read_text()
    witness = Witness(library, lambda call: None)
    witness.start()
    witness.stop()
    assert Path("/proc/self/mounts").read_text() == before
    other = tmp_path / "main"
    failing = Witness(other, lambda call: None)
    with pytest.raises(MissingRequirement, match="exports none of"):
        failing.start()
    assert Path("/proc/self/mounts").read_text() == before
