"""The real daemon on a board, as systemd would run it, and what runs beside it.

A daemon sees every llama.cpp process of the machine. Tests therefore run copies of their
own (`LlamaCopy`), and the configuration counts no program from elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moetuner.demo.llamacpp import LlamaBuild
from moetuner.demo.services import LlamaServer, Service, free_port
from tests.support.devfreqfs import Mounted

REPOSITORY = Path(__file__).resolve().parents[2]
# Nothing here takes a second; a machine that is busy with other things may need many.
PATIENCE_S = 60.0
HOLD_S = 0.3  # the shortest that still lets a slow test machine's calls count as one activity
LOWEST, HIGHEST = 306_000_000, 1_020_000_000  # of an Orin Nano's GPU
PER_PROGRAM = ("anon_inode:[perf_event]", "anon_inode:[pidfd]", "threads")
UNKNOWN = -1
_NUMBERS = itertools.count()


def until(condition: Callable[[], object], what: str, told: Callable[[], str] = str) -> None:
    """Waits for `condition`; fails with `told()`."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never: {what}\n{told()}"
        time.sleep(0.01)


def moetuner(
    *arguments: str | Path, env: Mapping[str, str] = {}, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "moetuner", *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **env},
        **options,
    )


def outside(directory: Path) -> list[str]:
    """Patterns (fnmatch) that together match each path that is not below `directory`."""
    prefix = f"{directory}/"
    return [f"{prefix[:at]}[!{prefix[at]}]*" for at in range(1, len(prefix))]


class Daemon:
    """`moetuner daemon` in a process of its own; its log in a file, its notifications here."""

    def __init__(
        self,
        root: Path,
        directory: Path,
        configuration: str,
        env: Mapping[str, str] = {},
        arguments: Sequence[str] = (),
    ) -> None:
        number = next(_NUMBERS)
        self.root = root
        self.config = directory / f"daemon-{number}.yaml"
        self.config.write_text(configuration)
        self.log = directory / f"daemon-{number}.log"
        address = f"moetuner-test-{os.getpid()}-{number}"  # abstract: no limit of path length
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(f"\0{address}")
        self._notices: list[str] = []
        command = [sys.executable, "-m", "moetuner", "daemon", "--root", root]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--config", str(self.config), *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": f"@{address}", **env},
            )
        self.pid = self.process.pid

    # -- what it says -------------------------------------------------------------------

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        return self.text().splitlines()

    def floors(self, since: int = 0) -> list[str]:
        """The lines that say where the floor is."""
        return [line for line in self.lines[since:] if line.startswith("floor ")]

    def rest(self, since: int = 0) -> list[str]:
        """Lines that are not about files and processes, which others may have too."""
        about = r"((no longer |not )?watching|pid \d+) .*"
        return [line for line in self.lines[since:] if not re.fullmatch(about, line)]

    def await_line(self, pattern: str, since: int = 0) -> str:
        """The first line, `since` so many, that matches the whole of `pattern`."""
        found: list[str] = []

        def there() -> bool:
            assert self.process.poll() is None, f"the daemon ended\n{self.text()}"
            found[:] = [line for line in self.lines[since:] if re.fullmatch(pattern, line)]
            return bool(found)

        until(there, f"line {pattern!r}", self.text)
        return found[0]

    @property
    def notices(self) -> list[str]:
        """What it told its service manager so far."""
        while select.select([self._notify], [], [], 0)[0]:
            self._notices.append(self._notify.recv(65536).decode())
        return self._notices

    def notified(self, text: str) -> bool:
        return any(text in notice.splitlines() for notice in self.notices)

    def status(self) -> dict[str, Any]:
        """status.json as it is now; empty if there is none."""
        try:
            value = json.loads((self.root / "run/moetuner/status.json").read_text())
        except FileNotFoundError:
            return {}
        assert isinstance(value, dict)
        return value

    def process_status(self, pid: int) -> dict[str, Any]:
        """What status says of a process; empty if nothing."""
        found = [p for p in self.status().get("processes", []) if p["pid"] == pid]
        return found[0] if found else {}

    def await_idle(self) -> None:
        """Until the activity that it knows of is over and status says so."""
        asked = time.time()

        def over() -> bool:
            status = self.status()
            # Changes are written within a second: what is older then is true still.
            current = status["updated"] > asked or time.time() > asked + HOLD_S + 2
            return current and not status["floor"]["who"]

        until(over, "idle", self.text)

    # -- what is done to it -------------------------------------------------------------

    def await_ready(self) -> Daemon:
        self.await_line("ready")
        return self

    def await_watching(self, library: Path) -> None:
        """Until the library's calls are seen: ready says nothing of files."""
        self.await_line(f"watching {re.escape(str(library))} .*")

    def reload(self, configuration: str) -> None:
        """SIGHUP after the file was replaced; returns when it says that it is ready again."""
        before = len(self.notices)
        self.config.write_text(configuration)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: any("READY=1" in n for n in self.notices[before:]), "reloaded", self.text)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def dismiss(self) -> bool:
        """Tells it to stop, without waiting; whether it ran until now."""
        self._notify.close()
        if self.process.poll() is not None:
            return False
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        return True

    # -- what it holds ------------------------------------------------------------------

    def held(self, ours: Path) -> dict[str, int]:
        """Its threads and descriptors by kind, files by name. Without files that are not
        below `ours`: other people's processes use them; if there are any, it is UNKNOWN
        how many probes and processes it should hold, and whether a thread takes some out."""
        kinds = Counter(threads=len(os.listdir(f"/proc/{self.pid}/task")))
        foreign = False
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                leads_to = re.sub(r":\[\d+\]", "", os.readlink(path))
                other = leads_to.startswith("/") and not leads_to.startswith(
                    (f"{ours}/", os.devnull)
                )
                foreign |= other
                kinds[leads_to] += not other
        if foreign:
            return {**kinds, **dict.fromkeys(PER_PROGRAM, UNKNOWN)}
        return dict(kinds)


class Dismissed:
    """Daemons that were told to stop: taking probes out takes the kernel seconds, in which
    the next test can run. All must end, and well."""

    def __init__(self) -> None:
        self._daemons: list[Daemon] = []

    def add(self, daemon: Daemon) -> None:
        if daemon.dismiss():
            self._daemons.append(daemon)

    def close(self) -> None:
        try:
            for daemon in self._daemons:
                assert daemon.process.wait(PATIENCE_S) == 0, daemon.text()
        finally:
            for daemon in self._daemons:
                daemon.process.kill()


class Stage:
    """A board, its daemons and its writes. Only programs below `ours` count."""

    def __init__(self, board: Mounted, directory: Path, ours: Path, dismissed: Dismissed) -> None:
        self.board = board
        self.directory = directory
        self.ours = ours
        self._never = outside(ours)
        self._dismissed = dismissed
        self._daemons: list[Daemon] = []

    def configuration(self, floor: str = "hold: 0.3", watch: str = "", match: str = "") -> str:
        """Sections in YAML's flow style: `floor="hold: 1, frequency: 918 MHz"`."""
        never = json.dumps(self._never)
        both = f"never: {never}, {match}" if match else f"never: {never}"
        return f"floor: {{{floor}}}\nwatch: {{{watch}}}\nmatch: {{{both}}}\n"

    def launch(
        self,
        configuration: str | None = None,
        env: Mapping[str, str] = {},
        arguments: Sequence[str] = (),
    ) -> Daemon:
        """A daemon that need not be ready yet."""
        text = self.configuration() if configuration is None else configuration
        daemon = Daemon(self.board.root, self.directory, text, env, arguments)
        self._daemons.append(daemon)
        return daemon

    def daemon(self, *arguments: Any, **options: Any) -> Daemon:
        """A daemon that is ready."""
        return self.launch(*arguments, **options).await_ready()

    # -- the GPU's node -----------------------------------------------------------------

    def min_hz(self) -> int:
        return int(self.board.path("min_freq").read_text())

    def await_min(self, hz: int) -> None:
        until(lambda: self.min_hz() == hz, f"min_freq {hz}", self.told)

    def write(self, attribute: str, hz: int) -> None:
        """As nvpmodel, jetson_clocks or a person would: open, write, close."""
        self.board.path(attribute).write_text(str(hz))

    def writes(self) -> list[tuple[str, str]]:
        """Everything written to the node's files, by whomever: (attribute, text)."""
        return [(write.attribute, write.text) for write in self.board.writes()]

    def restore(self) -> subprocess.CompletedProcess[str]:
        return moetuner("restore", "--root", self.board.root)

    def told(self) -> str:
        return "\n".join(daemon.text() for daemon in self._daemons)

    def close(self) -> None:
        for daemon in self._daemons:
            self._dismissed.add(daemon)


class Act:
    """A stretch of a daemon's life: what it said and what was written since it began."""

    def __init__(self, stage: Stage, daemon: Daemon) -> None:
        self._stage = stage
        self.daemon = daemon
        self._lines = len(daemon.lines)
        self._writes = len(stage.writes())

    def await_line(self, pattern: str) -> str:
        return self.daemon.await_line(pattern, self._lines)

    @property
    def lines(self) -> list[str]:
        return self.daemon.lines[self._lines :]

    @property
    def floors(self) -> list[str]:
        return self.daemon.floors(self._lines)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return self._stage.writes()[self._writes :]


class LlamaCopy:
    """llama-server and its libraries in files of the test's own, as somebody installs them."""

    def __init__(self, build: LlamaBuild, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for path in build.bin.iterdir():
            if path.name == "llama-server" or ".so" in path.name:
                shutil.copy2(path, directory / path.name, follow_symlinks=False)

    @property
    def server(self) -> Path:
        return self.directory / "llama-server"

    @property
    def libllama(self) -> Path:
        """The file itself, not one of the links to it."""
        return (self.directory / "libllama.so").resolve()

    def script(self, path: Path, env: Mapping[str, str] = {}, prelude: str = "") -> Path:
        """A program that becomes this llama-server, by its own libraries, with `env`."""
        libraries = {"LD_LIBRARY_PATH": str(self.directory)}
        exports = [f"export {k}={shlex.quote(v)}" for k, v in {**libraries, **env}.items()]
        run = f'exec {shlex.quote(str(self.server))} "$@"'
        path.write_text("\n".join(["#!/bin/sh", *exports, prelude or run, ""]))
        path.chmod(0o755)
        return path


class Router(Service):
    """llama-server in router mode: it starts another one for the model that is asked for."""

    def __init__(self, program: Path, log: Path, arguments: Sequence[str]) -> None:
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        super().__init__("router", [program, "--port", str(port), *arguments], log)

    def complete(self, model: str, tokens: int) -> None:
        body = {"model": model, "prompt": "vo", "n_predict": tokens, "ignore_eos": True}
        with self._open("/completion", json.dumps(body).encode()) as answer:
            assert json.load(answer)["tokens_predicted"] == tokens

    def healthy(self) -> bool:
        try:
            with self._open("/health") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _open(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(
            self._address + path, body, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=PATIENCE_S)


class Servers:
    """Starts copies of llama-server and ends them with the test."""

    def __init__(self, copy: LlamaCopy, directory: Path) -> None:
        self.copy = copy
        self._directory = directory
        self._running: list[Service] = []

    def start(
        self, model: Path, *arguments: str, env: Mapping[str, str] = {}, prelude: str = ""
    ) -> LlamaServer:
        """A server that answers requests; `prelude` replaces the script's last line."""
        name = f"server-{next(_NUMBERS)}"
        script = self.copy.script(self._directory / name, env, prelude)
        log = self._directory / f"{name}.log"
        server = LlamaServer(script, model, log, arguments)
        self._running.append(server)
        server.await_ready()
        return server

    def route(self, *arguments: str) -> Router:
        """A server without a model, which starts others when they are asked for."""
        name = f"router-{next(_NUMBERS)}"
        script = self.copy.script(self._directory / name)
        router = Router(script, self._directory / f"{name}.log", arguments)
        self._running.append(router)
        until(router.healthy, "router is healthy", router.log.read_text)
        return router

    def close(self) -> None:
        for server in self._running:
            server.stop()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run meanwhile, as on a machine that is overloaded or suspended."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
