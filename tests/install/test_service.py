"""install.sh and moetuner.service under a real service manager, with all of its sandbox.

Not a booted machine (tests/vm is), but the same code that makes the mount namespace,
drops the capabilities and sets the system call filter; and this machine's own kernel.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetuner.demo import board as boards
from tests.bpf.harness import Driver
from tests.bpf.natives import Natives
from tests.install.system import NOBODY, ROOT, PrivateSystem, checkout, private_system, until
from tests.support.machine import cannot

pytestmark = pytest.mark.root

IN_A_FILE = "[Service]\nStandardOutput=append:/run/journal\nStandardError=append:/run/journal"
ON_THE_BOARD = """\
[Service]
ExecStart=
ExecStart=/opt/moetuner/bin/moetuner daemon --root /run/board
ExecStopPost=
ExecStopPost=/opt/moetuner/bin/moetuner restore --root /run/board
ReadWritePaths=/run/board
RestartSec=100ms
"""
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
# Whatever else runs on this machine shall not raise this floor.
ONLY_OURS = "match:\n  never: [llama-*, python*]\n"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> boards.Board:
    return boards.create(tmp_path_factory.mktemp("service") / "board")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def system(board: boards.Board, source: Path) -> Iterator[PrivateSystem]:
    """Installed, on the simulated board, its service started."""
    with private_system(board.root) as system:
        system.do(source / "install.sh", "--no-start")
        system.drop_in("log", IN_A_FILE)
        system.drop_in("board", ON_THE_BOARD)
        system.do("sh", "-c", f"printf '%s' '{ONLY_OURS}' >/etc/moetuner/moetuner.yaml")
        system.do("systemctl", "start", "moetuner")
        yield system


@pytest.fixture
def caller() -> Iterator[Driver]:
    """Somebody else's program: nobody runs it, and nobody else may read it."""
    with tempfile.TemporaryDirectory(prefix="moetuner-test-", dir="/tmp") as name:
        directory = Path(name)
        natives = Natives(directory)
        library, program = natives.library(), natives.driver
        for path in (directory, library, program):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o700)
        driver = Driver([*AS_NOBODY, "env", "LLAMA_ARG_CPU_MOE=1", program])
        driver.load(library)
        yield driver
        driver.close()


def _started(system: PrivateSystem) -> None:
    """Whatever the test before did to it."""
    if system.property("ActiveState") != "active":
        system.do("systemctl", "reset-failed", "moetuner")
        system.do("systemctl", "restart", "moetuner")


def test_it_is_enabled_and_runs_with_few_powers(system: PrivateSystem) -> None:
    _started(system)
    assert system.property("ActiveState") == "active"
    assert (system.written / "etc/systemd/system/multi-user.target.wants").is_dir()
    status = system.do("cat", f"/proc/{system.property('MainPID')}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    # dac_read_search 2, kill 5, setgid 6, setuid 7, sys_ptrace 19, sys_admin 21
    assert int(fields["CapEff"], 16) == sum(1 << bit for bit in (2, 5, 6, 7, 19, 21))
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_it_goes_before_what_it_serves(system: PrivateSystem) -> None:
    _started(system)
    if system.run("prlimit", "--rtprio=1:1", "true").returncode != 0:
        cannot("no CAP_SYS_RESOURCE: the service manager cannot raise limits")
    pid = int(system.property("MainPID"))
    realtime = os.sched_getscheduler(pid) == os.SCHED_RR | os.SCHED_RESET_ON_FORK
    # A kernel with CONFIG_RT_GROUP_SCHED may have no real-time share for services.
    assert realtime or os.getpriority(os.PRIO_PROCESS, pid) == -10


def test_anybody_may_ask_for_its_status(system: PrivateSystem) -> None:
    _started(system)
    ask = (*AS_NOBODY, "moetuner", "status", "--root", "/run/board")
    until(lambda: system.run(*ask).returncode == 0, "a status")


def test_the_floor_follows_a_stranger_s_calls(
    system: PrivateSystem, board: boards.Board, caller: Driver
) -> None:
    _started(system)

    def raised() -> bool:
        caller.ask("call decode 1")
        return board.floor() == boards.FREQUENCIES[-1]

    until(raised, f"raised: {system.journal()}")
    until(lambda: board.floor() == board.lowest(), "put back")
    assert f"floor 1020 MHz (pid {caller.pid} " in system.journal()
    assert "floor 306 MHz (idle)" in system.journal()


def test_sigkill_leaves_nothing_raised_and_it_starts_again(
    system: PrivateSystem, board: boards.Board, caller: Driver
) -> None:
    def raised() -> bool:
        caller.ask("call decode 1")
        return board.floor() == boards.FREQUENCIES[-1]

    def killed() -> bool:
        """False: systemctl took longer than the hold, so nothing was raised any more."""
        _started(system)
        before = system.property("MainPID")
        until(raised, f"raised: {system.journal()}")
        system.do("systemctl", "kill", "--signal=KILL", "--kill-who=main", "moetuner")
        until(lambda: board.floor() == board.lowest(), f"put back: {system.journal()}")
        until(lambda: system.property("MainPID") not in ("0", before), "running again")
        until(lambda: system.property("ActiveState") == "active", "ready again")
        return "left raised by process" in system.journal()

    assert any(killed() for _ in range(5)), system.journal()


def test_a_broken_configuration_ends_it_for_good(system: PrivateSystem) -> None:
    _started(system)
    system.do("sh", "-c", "echo 'floor: {hold: never}' >/run/broken.yaml")
    system.drop_in(
        "broken",
        "[Service]\nExecStart=\n"
        "ExecStart=/opt/moetuner/bin/moetuner daemon --root /run/board --config /run/broken.yaml",
    )
    try:
        assert system.run("systemctl", "restart", "moetuner").returncode != 0
        assert system.property("ExecMainStatus") == "2"
        time.sleep(0.5)  # five times RestartSec
        assert system.property("ActiveState") == "failed"
        assert "/run/broken.yaml:1: floor.hold" in system.journal()
    finally:
        system.do("rm", "/etc/systemd/system/moetuner.service.d/broken.conf")
        system.do("systemctl", "daemon-reload")


def test_a_reload_reads_the_configuration(system: PrivateSystem) -> None:
    _started(system)
    pid = system.property("MainPID")
    system.do("systemctl", "reload", "moetuner")
    reloaded = "configuration reloaded from /etc/moetuner/moetuner.yaml"
    until(lambda: reloaded in system.journal(), "reloaded")
    assert system.property("MainPID") == pid


TRY = r"""
tried() { if sh -c "$2" >/dev/null 2>&1; then echo "$1 yes"; else echo "$1 no"; fi; }
python=/usr/bin/python3
tried write-etc 'touch /etc/x'
tried write-the-program 'touch /opt/moetuner/x'
tried write-home 'touch /root/x'
tried read-home 'ls /root'
tried write-run 'touch /run/x'
tried write-its-own-run 'touch /run/moetuner/x && rm /run/moetuner/x'
tried write-tmp 'touch /tmp/moetuner-x /var/tmp/moetuner-x'
tried write-devices 'echo change >/sys/devices/virtual/mem/null/uevent'
tried write-other-sys 'test -w /sys/kernel/uevent_seqnum -o -w /sys/kernel/mm'
tried write-tunables 'echo 1 >/proc/sys/kernel/sysrq'
tried see-others 'cat /proc/$PID/environ && ls /proc/$PID/map_files && cat /proc/$PID/syscall'
tried see-modules 'ls /lib/modules'
tried see-devices 'test -e /dev/kmsg -o -e /dev/mem'
tried mount 'mount -t tmpfs x /tmp'
tried namespace 'unshare --mount true'
tried trace-others "$python -c 'import ctypes; exit(ctypes.CDLL(None).ptrace(16, $PID, 0, 0))'"
tried the-host-s-network 'test "$(readlink /proc/self/ns/net)" = "$(readlink /proc/$PID/ns/net)"'
tried inet "$python -c 'import socket; socket.socket(socket.AF_INET)'"
tried netlink "$python -c 'import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)'"
tried go-first 'chrt --reset-on-fork --rr 1 true && nice -n -10 true'
tried write-and-execute "$python -c 'import mmap; mmap.mmap(-1, 4096, prot=7)'"
"""
ALLOWED = {"read-home", "write-its-own-run", "write-tmp", "write-devices", "see-others"}
ALLOWED |= {"see-modules", "netlink", "go-first"}


def test_the_sandbox_allows_what_is_needed_and_refuses_the_rest(
    system: PrivateSystem, caller: Driver
) -> None:
    left_out = ("Type=", "NotifyAccess=", "Exec", "Watchdog", "Restart", "RuntimeDirectory=")
    unit = "\n".join(
        line
        for line in (ROOT / "systemd/moetuner.service").read_text().splitlines()
        if not line.startswith(left_out)
    )
    instead = f"""
Type=oneshot
RuntimeDirectory=moetuner-try
Environment=PID={caller.pid}
ExecStart=/bin/sh /run/try.sh
StandardOutput=append:/run/tried
# In place of LimitRTPRIO=, which not every machine can raise: the filter is what is tried.
CapabilityBoundingSet=CAP_SYS_NICE
"""
    unit = unit.replace("[Service]", "[Service]" + instead)
    script = TRY.replace("/run/moetuner/", "/run/moetuner-try/")
    for path, text in (("/run/try.sh", script), ("/etc/systemd/system/try.service", unit)):
        system.do("sh", "-c", f"cat >{path} <<'TEXT'\n{text}\nTEXT\n")
    system.do("systemctl", "daemon-reload")
    system.do("systemctl", "start", "try.service")
    answers = dict(line.split() for line in system.do("cat", "/run/tried").splitlines())
    system.do("rm", "/etc/systemd/system/try.service")
    assert len(answers) == TRY.count("\ntried ")
    assert {name for name, answer in answers.items() if answer == "yes"} == ALLOWED


def test_the_same_again_changes_nothing_and_an_upgrade_restarts_it(
    system: PrivateSystem, source: Path
) -> None:
    _started(system)
    until(lambda: system.property("ActiveState") == "active", "running")
    system.run(source / "install.sh")
    pid, program = system.property("MainPID"), system.do("readlink", "/opt/moetuner/lib")
    system.run(source / "install.sh")
    assert system.property("MainPID") == pid
    assert system.do("readlink", "/opt/moetuner/lib") == program

    with (source / "moetuner/errors.py").open("a") as file:
        file.write("# newer\n")
    result = system.run(source / "install.sh")
    assert "moetuner is installed" in result.stdout, result.stderr
    assert system.property("MainPID") not in (pid, "0")
    assert system.do("readlink", "/opt/moetuner/lib") != program
    assert len(system.do("sh", "-c", "ls -d /opt/moetuner/lib.*").split()) == 1
    assert system.do("cat", "/etc/moetuner/moetuner.yaml") == ONLY_OURS


def test_no_start_leaves_the_old_one_running_and_the_next_run_restarts_it(
    system: PrivateSystem, source: Path
) -> None:
    _started(system)
    pid = system.property("MainPID")
    with (source / "moetuner/errors.py").open("a") as file:
        file.write("# newer still\n")
    system.do(source / "install.sh", "--no-start")
    assert system.property("MainPID") == pid
    assert len(system.do("sh", "-c", "ls -d /opt/moetuner/lib.*").split()) == 2
    system.run(source / "install.sh")
    assert system.property("MainPID") not in (pid, "0")
    assert len(system.do("sh", "-c", "ls -d /opt/moetuner/lib.*").split()) == 1


def test_uninstall_leaves_the_configuration_and_purge_nothing(
    system: PrivateSystem, source: Path
) -> None:
    _started(system)
    system.do(source / "install.sh", "--uninstall")
    assert system.run("systemctl", "is-active", "moetuner").stdout.strip() == "inactive"
    assert system.run("test", "-e", "/run/moetuner").returncode != 0
    left = {
        str(path.relative_to(system.written))
        for name in ("etc", "opt", "local")
        for path in (system.written / name).rglob("*")
        if not path.is_dir()
    }
    drop_ins = {f"etc/systemd/system/moetuner.service.d/{n}.conf" for n in ("log", "board")}
    assert left == {"etc/moetuner/moetuner.yaml", *drop_ins}
    system.do(source / "install.sh", "--purge")
    assert system.run("test", "-e", "/etc/moetuner").returncode != 0
    assert system.run("test", "-e", "/etc/systemd/system/moetuner.service.d").returncode != 0
