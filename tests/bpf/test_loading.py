"""The probe's compiler as a process of its own: what comes back when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moetuner
from moetuner.errors import MissingRequirement, MoetunerError, SystemRefused
from moetuner.watch import layout
from moetuner.watch.bpf import LibBpf
from moetuner.watch.program import PROBE_DIR, _received, load
from tests.bpf.harness import descriptors

pytestmark = pytest.mark.root
PYTHON = "/usr/bin/python3"  # another user may not reach the tests' own
TRY = """
from moetuner.errors import MoetunerError
from moetuner.watch.program import load
try:
    load().close()
    print("loaded")
except MoetunerError as error:
    print(error.exit_code, error)
"""


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """The program where everyone can read it."""
    package = Path(moetuner.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(package, root / "moetuner")
        shutil.copytree(PROBE_DIR, root / "probes")
        subprocess.run(["chmod", "-R", "a+rX", str(root)], check=True)
        yield root


def attempt(installed: Path, *wrapper: str, **environment: str) -> tuple[str, str]:
    """Standard output and error of an attempt to load, run through `wrapper`."""
    done = subprocess.run(
        [*wrapper, PYTHON, "-c", TRY],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed), **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr


REFUSED = {
    "nobody": (
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
        "3 eBPF needs root (run with sudo)",
    ),
    "no capabilities": (
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
        "3 the kernel refuses eBPF programs to this process (CAP_SYS_ADMIN",
    ),
    "pid namespace": (
        ["unshare", "--pid", "--fork"],
        "3 running inside a pid namespace (a container)",
    ),
}


@pytest.mark.parametrize(("wrapper", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(installed: Path, wrapper: list[str], said: str) -> None:
    out, err = attempt(installed, *wrapper)
    assert out.startswith(said), out
    assert err == ""


def test_two_capabilities_are_enough(installed: Path) -> None:
    wrapper = ["setpriv", "--bounding-set=-all,+bpf,+perfmon", "--inh-caps=-all"]
    assert attempt(installed, *wrapper) == ("loaded", "")


def test_no_writable_directory_is_needed_for_messages(installed: Path) -> None:
    out, err = attempt(installed, TMPDIR="/nowhere")
    assert out == "loaded" or out.startswith("4 the probe's compiler failed: "), out
    assert err == ""


def append(text: str) -> Callable[[str], str]:
    return lambda probe: probe + text


def change(old: str, new: str) -> Callable[[str], str]:
    return lambda probe: probe.replace(old, new)


BROKEN: dict[str, tuple[Callable[[str], str], type[MoetunerError], str]] = {
    "syntax": (append("\nnonsense\n"), SystemRefused, "error: "),
    "header": (append("\n#include <linux/nothere.h>\n"), MissingRequirement, "linux/nothere.h"),
    "verifier": (
        change("if (value)", "if (1)"),
        SystemRefused,
        "this kernel's verifier refuses the probe",
    ),
    "a program is missing": (
        change("int leave_site(", "int leave_somewhere("),
        SystemRefused,
        "leave_site",
    ),
    "a map is missing": (
        change("u32, u32, verdicts, 1024", "u32, u32, verdict, 1024"),
        SystemRefused,
        "verdicts",
    ),
    "empty": (lambda probe: "", SystemRefused, ""),
    "no text at all": (lambda probe: "\udcff\udcfe", SystemRefused, ""),
}


@pytest.mark.parametrize(("breaks", "kind", "said"), BROKEN.values(), ids=BROKEN)
def test_broken(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    breaks: Callable[[str], str],
    kind: type[MoetunerError],
    said: str,
) -> None:
    shutil.copytree(PROBE_DIR, tmp_path / "probes")
    path = tmp_path / "probes" / "inference.bpf.c"
    path.write_text(breaks(path.read_text()), errors="surrogateescape")
    before = descriptors()
    with pytest.raises(kind) as caught:
        load(path.parent)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")
    assert descriptors() == before


def test_too_few_descriptors_may_be_open() -> None:
    """The kernel drops those that the receiver may not have."""
    message = {"ok": True, "names": ["events", "threads"], "headers": ""}
    before = descriptors()
    with pytest.raises(SystemRefused, match="only 1 of 2") as caught:
        _received(LibBpf(), json.dumps(message).encode(), [os.open("/", os.O_RDONLY)], 0)
    assert "LimitNOFILE" in (caught.value.hint or "")
    assert descriptors() == before


@pytest.mark.parametrize(("status", "how"), [(-9, "signal 9"), (1, "status 1")])
def test_a_compiler_that_says_nothing(status: int, how: str) -> None:
    """Killed for memory, say."""
    with pytest.raises(SystemRefused, match=how):
        _received(LibBpf(), b"", [], status)


def test_no_probe_at_all(tmp_path: Path) -> None:
    with pytest.raises(MissingRequirement, match="is missing"):
        load(tmp_path)


def test_the_working_directory_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` would import these as root."""
    for name in ("json", "socket", "bcc", "moetuner"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken in')")
    monkeypatch.chdir(tmp_path)
    program = load()
    assert program.counter(layout.COUNTER_LOST) == 0
    program.close()


def test_load_and_close_leave_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    load().close()
    before = descriptors()
    for _ in range(2):
        program = load()
        assert set(program.fds) == {
            *layout.MAPS,
            *layout.UPROBE_PROGRAMS,
            *layout.TRACEPOINT_PROGRAMS,
        }
        program.close()
    assert descriptors() == before
    assert capfd.readouterr() == ("", "")
