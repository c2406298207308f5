"""The processes of the demonstration: the daemon, llama-server, the board's governor."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import moetuner
from moetuner.errors import SystemRefused

READY_S = 90.0  # bcc compiles for 14 s on an emulated machine; a model loads in under one
STOP_S = 30.0  # taking uprobes back took the daemon up to 14 s on a busy machine


class Service:
    """One child process, in a session of its own so that Ctrl-C reaches only us.

    Its output goes to `log`, a file, and so outlives us if it is left running.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **env},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """SIGTERM, after STOP_S SIGKILL; the exit status (negative: the signal)."""
        if self.running():
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def failure(self, what: str) -> SystemRefused:
        """`what` with the end of the log and, if it ended, how."""
        status = self._process.poll()
        if status is None:
            ended = ""
        elif status < 0:
            ended = f" (ended by {signal.Signals(-status).name})"
        else:
            ended = f" (ended with status {status})"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-10:]
        tail = "".join(f"\n    {line[:200]}" for line in lines) or " (nothing)"
        return SystemRefused(f"{self.name} {what}{ended}. The end of its log:{tail}")


def _package_environment() -> dict[str, str]:
    """Lets a child import this very package, wherever it lies."""
    parent = str(Path(moetuner.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))}


def start_governor(board: Path, log: Path) -> Service:
    """Plays the governor of the board that lies in `board`."""
    command: list[str | Path] = [sys.executable, "-m", "moetuner.demo.board", "--existing", board]
    return Service("the board's governor", command, log, _package_environment())


class Daemon(Service):
    """The real daemon on a board's tree. Returns from the constructor when it says READY=1.

    Raises SystemRefused with its last words if it ends first or never gets ready.
    """

    def __init__(self, board: Path, config: Path, log: Path) -> None:
        address = board.parent / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(address))
            command: list[str | Path] = [sys.executable, "-m", "moetuner", "daemon"]
            command += ["--root", board, "--config", config]
            environment = {**_package_environment(), "NOTIFY_SOCKET": str(address)}
            super().__init__("moetuner daemon", command, log, environment)
            try:
                self._await_ready(notify)
            except BaseException:
                self.stop()
                raise
            finally:
                address.unlink(missing_ok=True)

    def _await_ready(self, notify: socket.socket) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self.running():
                raise self.failure("did not start")
            if select.select([notify], [], [], 0.2)[0] and b"READY=1" in notify.recv(65536):
                return
        raise self.failure(f"was not ready after {READY_S:.0f} s")


@dataclass(frozen=True)
class Answer:
    """What /completion gave."""

    text: str
    tokens: int
    tokens_per_second: float
    prompt_tokens: int
    prompt_tokens_per_second: float


class LlamaServer(Service):
    """A real llama-server on a loopback port; use `await_ready` before the first request.

    `arguments` may set --threads and --ctx-size otherwise; `prefix` is a command that runs it
    under other conditions.
    """

    def __init__(
        self,
        program: Path,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] = {},
        prefix: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self._again = (program, model, log, tuple(arguments))
        self._env, self._prefix = env, prefix
        command: list[str | Path] = [*prefix, program, "-m", model, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--parallel", "1"]
        # One thread: on two cores the daemon and the requests need the other.
        for name, value in (("--ctx-size", "16384"), ("--threads", "1")):
            command += [] if name in arguments else [name, value]
        command += arguments
        super().__init__(" ".join(["llama-server", *arguments]), command, log, env)

    def restarted(self) -> LlamaServer:
        """Another one like this, on another port."""
        return LlamaServer(*self._again, env=self._env, prefix=self._prefix)

    def await_ready(self) -> None:
        """Returns when /health says so; SystemRefused if the server ends or never does."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self.running():
                raise self.failure("did not start")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise self.failure(f"was not ready after {READY_S:.0f} s")

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(
        self, prompt: str | Sequence[int], tokens: int, timeout_s: float = 300.0
    ) -> Answer:
        """Decodes exactly `tokens` tokens after a text, or after tokens.

        SystemRefused if the server does not answer so.
        """
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            f"{self._url}/completion",
            data=json.dumps({**body, "seed": 1}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer = json.load(response)
            return Answer(
                text=answer["content"],
                tokens=answer["tokens_predicted"],
                tokens_per_second=answer["timings"]["predicted_per_second"],
                prompt_tokens=answer["timings"]["prompt_n"],
                prompt_tokens_per_second=answer["timings"]["prompt_per_second"],
            )
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            raise self.failure(f"did not answer a request: {error}") from error


def free_port() -> int:
    """A port of the loopback interface that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
