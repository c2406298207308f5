"""The main job: a real llama-server infers, and only meanwhile the floor is up.

./run-tests daemon -k inference
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from moetuner.demo.services import LlamaServer
from tests.bpf.harness import Driver
from tests.daemon.harness import (
    HIGHEST,
    LOWEST,
    Act,
    Daemon,
    LlamaCopy,
    Servers,
    Stage,
    until,
)

pytestmark = pytest.mark.root
UP_AND_DOWN = [("min_freq", str(HIGHEST)), ("min_freq", str(LOWEST))]


IDLE = r"floor 306 MHz \(idle\)"


@pytest.fixture(scope="module")
def lasting(
    tmp_path_factory: pytest.TempPathFactory,
    make_stage: Callable[[Path], AbstractContextManager[Stage]],
) -> Iterator[tuple[Stage, Daemon]]:
    """A daemon that runs on from test to test."""
    with make_stage(tmp_path_factory.mktemp("lasting")) as stage:
        yield stage, stage.daemon()


@pytest.fixture
def act(lasting: tuple[Stage, Daemon]) -> Act:
    stage, daemon = lasting
    stage.await_min(LOWEST)
    return Act(stage, daemon)


def raised(server: LlamaServer | Driver, name: str = "llama-server") -> str:
    return f"floor 1020 MHz (pid {server.pid} {name} inference)"


def test_a_request_raises_the_floor_and_silence_puts_it_back(
    stage: Stage, servers: Servers, moe_model: Path
) -> None:
    server = servers.start(moe_model, "--cpu-moe")
    daemon = stage.daemon(stage.configuration(floor=""))  # with the default hold time
    daemon.await_watching(servers.copy.libllama)
    assert stage.writes() == []  # a server that waits for requests is no reason

    server.complete("vo", 100)
    daemon.await_line(re.escape(raised(server)))
    daemon.await_line(IDLE)

    assert daemon.floors() == [raised(server), "floor 306 MHz (idle)"]
    assert stage.writes() == UP_AND_DOWN  # and not one more for each token
    until(lambda: daemon.process_status(server.pid).get("calls", 0) >= 100, "calls counted")
    told = daemon.process_status(server.pid)
    assert told["counts"] and "--cpu-moe" in told["reason"]
    about_it = [line for line in daemon.lines if f"pid {server.pid} " in line]
    assert about_it == [
        f"pid {server.pid} llama-server keeps experts on the CPU: {told['reason']}",
        raised(server),
    ]
    # Wake-ups of the daemon by the probe: the first call, and at most one a token that
    # came later than half the hold time after the one before.
    assert daemon.status()["probe"]["wakeups"] <= 3
    assert daemon.status()["probe"]["lost"] == 0


def test_a_second_request_is_a_second_pair_of_lines(
    act: Act, servers: Servers, moe_model: Path
) -> None:
    server = servers.start(moe_model, "--cpu-moe", "--no-warmup")
    act.daemon.await_watching(servers.copy.libllama)
    server.complete("vo", 5)
    until(lambda: len(act.floors) == 2, "up and down", act.daemon.text)
    server.complete("vo", 5)
    until(lambda: len(act.floors) == 4, "up and down again", act.daemon.text)
    assert act.floors == 2 * [raised(server), "floor 306 MHz (idle)"]
    assert act.writes == 2 * UP_AND_DOWN


def test_a_server_that_starts_later_is_noticed(
    stage: Stage, servers: Servers, moe_model: Path
) -> None:
    daemon = stage.daemon()
    server = servers.start(moe_model, "--cpu-moe", "--no-warmup")
    daemon.await_watching(servers.copy.libllama)
    assert stage.writes() == []
    server.complete("vo", 5)
    daemon.await_line(re.escape(raised(server)))
    stage.await_min(LOWEST)


def test_a_dense_model_changes_nothing(act: Act, servers: Servers, dense_model: Path) -> None:
    server = servers.start(dense_model, "--no-warmup")
    act.daemon.await_watching(servers.copy.libllama)
    server.complete("vo", 30)
    act.await_line(f"pid {server.pid} llama-server does not count: .*")
    until(lambda: act.daemon.process_status(server.pid), "in status")
    told = act.daemon.process_status(server.pid)
    assert not told["counts"] and not told["infers"]
    assert told["reason"].startswith("no flag keeps experts on the CPU")
    assert act.writes == [] and act.floors == []


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        ((), {"LLAMA_ARG_CPU_MOE": "1"}, "LLAMA_ARG_CPU_MOE"),
        ((), {"LLAMA_ARG_N_CPU_MOE": "2"}, "LLAMA_ARG_N_CPU_MOE=2"),
        (("-ncmoe", "3"), {}, "-ncmoe 3"),
        (("-ot", r"\.ffn_(up|down)_exps\.=CPU"), {}, "ffn_up_exps"),
        (("-ot", r"blk\.([0-9])\..*_exps.*=CPU,token_embd=CPU"), {}, "exps"),
    ],
    ids=["variable", "variable with a number", "short flag", "two of three", "list of patterns"],
)
def test_servers_that_count(
    act: Act,
    servers: Servers,
    moe_model: Path,
    arguments: tuple[str, ...],
    env: dict[str, str],
    why: str,
) -> None:
    server = servers.start(moe_model, *arguments, "--no-warmup", env=env)
    act.daemon.await_watching(servers.copy.libllama)
    server.complete("vo", 5)
    act.await_line(re.escape(raised(server)))
    assert why in act.await_line(f"pid {server.pid} llama-server keeps experts on the CPU: .*")
    act.await_line(IDLE)
    assert act.writes == UP_AND_DOWN


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--n-cpu-moe", "0"), {}),
        (("-ot", "attn_.*=CPU"), {}),
        ((), {"LLAMA_ARG_CPU_MOE": "0"}),
    ],
    ids=["none of the layers", "attention only", "variable that says no"],
)
def test_servers_that_do_not_count(
    act: Act,
    servers: Servers,
    moe_model: Path,
    arguments: tuple[str, ...],
    env: dict[str, str],
) -> None:
    server = servers.start(moe_model, *arguments, "--no-warmup", env=env)
    act.daemon.await_watching(servers.copy.libllama)
    server.complete("vo", 5)
    act.await_line(f"pid {server.pid} llama-server does not count: .*")
    assert act.writes == []


def test_an_empty_variable_counts_as_unset(
    act: Act, caller: Callable[..., Driver], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This llama-server refuses to start with it; others do not."""
    monkeypatch.setenv("LLAMA_ARG_N_CPU_MOE", "")
    monkeypatch.setenv("LLAMA_ARG_CPU_MOE", "")
    process = caller()
    act.daemon.await_watching(library)
    process.ask("call process 3")
    act.await_line(f"pid {process.pid} .* does not count: .*")
    assert act.writes == []


def test_the_router_s_child_is_judged_by_its_own_command_line(
    act: Act, servers: Servers, moe_model: Path, tmp_path: Path
) -> None:
    preset = tmp_path / "preset.ini"
    preset.write_text(f"[moe]\nmodel = {moe_model}\nn-cpu-moe = 4\nctx-size = 4096\n")
    router = servers.route("--models-preset", str(preset))
    act.daemon.await_watching(servers.copy.libllama)
    router.complete("moe", 5)
    line = act.await_line(r"floor 1020 MHz \(pid \d+ llama-server inference\)")
    child = int(line.split()[4])
    assert child != router.pid
    assert _parent(child) == router.pid
    assert "--n-cpu-moe 4" in act.await_line(f"pid {child} llama-server keeps experts .*")
    act.await_line(IDLE)
    assert [line for line in act.lines if f"pid {router.pid} " in line] == []


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
    assert found
    return int(found[1])


def test_a_server_killed_while_it_decodes(stage: Stage, servers: Servers, moe_model: Path) -> None:
    """As the OOM killer does. The hold time is a minute: it is not what puts back."""
    server = servers.start(moe_model, "--cpu-moe")
    daemon = stage.daemon(stage.configuration("hold: 60"))
    daemon.await_watching(servers.copy.libllama)
    request = _in_background(server, tokens=10000)
    stage.await_min(HIGHEST)
    os.kill(server.pid, signal.SIGKILL)
    request.join()
    daemon.await_line(IDLE)
    stage.await_min(LOWEST)
    assert daemon.floors() == [raised(server), "floor 306 MHz (idle)"]


def _in_background(server: LlamaServer, tokens: int) -> threading.Thread:
    """A request whose answer, or the lack of one, is of no interest."""

    def ask() -> None:
        try:
            server.complete("vo", tokens)
        except Exception as error:
            assert server.name in str(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_two_servers_at_once(act: Act, servers: Servers, moe_model: Path) -> None:
    first = servers.start(moe_model, "--cpu-moe", "--no-warmup")
    second = servers.start(moe_model, "--n-cpu-moe", "4", "--no-warmup")
    act.daemon.await_watching(servers.copy.libllama)
    requests = [_in_background(server, tokens=60) for server in (first, second)]
    for request in requests:
        request.join()
    act.await_line(IDLE)
    # However the two overlap, the floor went up once and came back once.
    assert act.writes == UP_AND_DOWN
    assert act.floors[0] in (raised(first), raised(second))

    def counted() -> bool:
        return all(act.daemon.process_status(s.pid).get("calls", 0) >= 60 for s in (first, second))

    until(counted, "both counted")


def test_a_server_with_its_own_copy_in_another_mount_namespace(
    stage: Stage, servers: Servers, moe_model: Path, tmp_path: Path
) -> None:
    """As in a container: its files are to be found nowhere in the daemon's file system."""
    private = tmp_path / "private"
    private.mkdir()
    daemon = stage.daemon()
    server = servers.start(
        moe_model, "--cpu-moe", "--no-warmup", prelude=_contained(servers.copy, private)
    )
    assert list(private.iterdir()) == []
    daemon.await_watching(private / servers.copy.libllama.name)
    server.complete("vo", 5)
    daemon.await_line(re.escape(raised(server)))
    stage.await_min(LOWEST)
    server.stop()
    daemon.reload(stage.configuration())  # scans, which it does every few minutes otherwise
    daemon.await_line(f"no longer watching {private}/libllama.so.*: no process maps it any more")
    assert f"{private}/" not in str(daemon.held(tmp_path))


def _contained(copy: LlamaCopy, private: Path) -> str:
    inner = (
        f"mount -t tmpfs none {private} && cp -a {copy.directory}/. {private} && "
        f"export LD_LIBRARY_PATH={private} && "
        f'exec {private}/llama-server "$@"'
    )
    return f"exec unshare --mount sh -c '{inner}' sh \"$@\""
