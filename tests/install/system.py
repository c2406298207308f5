"""Runs install.sh, below a directory or into a systemd of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.machine import cannot

ROOT = Path(__file__).parents[2]
SHIPPED = ("install.sh", "installer", "moetuner", "probes", "etc", "systemd", "docs")
# Nothing here takes ten seconds; a machine that is busy with other things may need many.
PATIENCE_S = 90.0
NOBODY = 65534

Result = subprocess.CompletedProcess[str]


def checkout(directory: Path) -> Path:
    """A copy of what install.sh needs, which a test may change and anybody may read."""
    directory.mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, directory / name, ignore=ignore)
        else:
            shutil.copy(source, directory / name)
    return directory


def installed_files(directory: Path) -> set[str]:
    """Everything below it that is no directory, and directories that are empty."""
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    }


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


class PrivateSystem:
    """See private_systemd.sh. `written`: what is in /etc, /opt, /usr/local beside the machine's."""

    def __init__(self, process: subprocess.Popen[str], written: Path) -> None:
        self.written = Path(f"/proc/{process.pid}/root{written}")
        self._namespace = f"/proc/{process.pid}/ns/mnt"

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> Result:
        """A command inside, as root; in /, without standard input."""
        return subprocess.run(
            ["nsenter", f"--mount={self._namespace}", "--wd=/", "--", *map(str, command)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": "/run",
                "XDG_CONFIG_HOME": "/run/config",
                **(env or {}),
            },
        )

    def do(self, *command: str | Path) -> str:
        """As run; its output. It has to succeed."""
        result = self.run(*command)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}{self.journal()}"
        return result.stdout

    def journal(self) -> str:
        """What the services logged (no journald runs here; see `log_to_file`)."""
        return self.run("cat", "/run/journal").stdout

    def property(self, name: str) -> str:
        return self.do("systemctl", "show", "--value", "--property", name, "moetuner").strip()

    def drop_in(self, name: str, text: str) -> None:
        directory = "/etc/systemd/system/moetuner.service.d"
        self.do("mkdir", "-p", directory)
        self.do("sh", "-c", f"cat >{directory}/{name}.conf <<'TEXT'\n{text}\nTEXT\n")
        self.do("systemctl", "daemon-reload")


@contextmanager
def private_system(board: Path) -> Iterator[PrivateSystem]:
    """`board` appears inside as /run/board."""
    if not any(Path(p, "systemd").exists() for p in ("/usr/lib/systemd", "/lib/systemd")):
        cannot("no systemd is installed")
    for filesystem in ("cgroup2", "overlay"):
        if filesystem not in Path("/proc/filesystems").read_text().split():
            cannot(f"the kernel has no {filesystem}")
    script = ROOT / "tests/install/private_systemd.sh"
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", str(script), str(board)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        word, _, written = process.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise AssertionError(f"no systemd of our own: {process.stderr.read()}")
        yield PrivateSystem(process, Path(written))
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()
