"""How llama.cpp is built: progress, jobs, place, lock, and what is said when it fails."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from moetuner.demo import llamacpp
from moetuner.demo.console import Console
from moetuner.errors import MissingRequirement


@pytest.mark.parametrize(
    ("line", "fraction"),
    [
        ("[12/222] Building CXX object src/x.cpp.o\n", 12 / 222),
        ("[222/222] Linking CXX executable bin/llama-server", 1.0),
        ("[ 12%] Building C object ggml/x.c.o", 0.12),
        ("[100%] Built target llama-server", 1.0),
        ("[0/0] Re-running CMake...", 0.0),
        ("-- Configuring done", None),
        ("warning: [12/222] inside a line", None),
    ],
)
def test_progress_is_read_from_ninja_and_make(line: str, fraction: float | None) -> None:
    assert llamacpp.progress_of(line) == fraction


@pytest.mark.parametrize(
    ("fraction", "elapsed", "text"),
    [
        (0.01, 60, "1:00 gone"),
        (0.5, 5, "0:05 gone"),
        (0.25, 60, "1:00 gone, about 3:00 left"),
        (1.0, 600, "10:00 gone, about 0:00 left"),
    ],
)
def test_time_left_is_only_given_when_it_is_no_guess(
    fraction: float, elapsed: float, text: str
) -> None:
    assert llamacpp.remaining(fraction, elapsed) == text


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(2, 24, 2), (8, 3, 2), (8, 1, 1), (4, 0, 1), (16, 64, 16)]
)
def test_jobs_follow_cores_and_memory(cores: int, gib: int, jobs: int) -> None:
    assert llamacpp.job_count(cores, gib << 30) == jobs


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [("/var/x", "/var/x/moetuner"), ("relative", "/h/.cache/moetuner"), ("", "/h/.cache/moetuner")],
)
def test_cache_directory(monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert llamacpp.cache_directory() == Path(expected)
    assert llamacpp.cache_directory("/given") == Path("/given")


def _fake_build(build: Path) -> None:
    (build / "bin").mkdir(parents=True)
    for name in (*llamacpp.TARGETS, "libllama.so"):
        (build / "bin" / name).touch()


def test_an_existing_build_is_described(tmp_path: Path) -> None:
    _fake_build(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text("X:BOOL=ON\nCMAKE_HOME_DIRECTORY:INTERNAL=/src\n")
    built = llamacpp.describe(tmp_path)
    assert built.server == tmp_path / "bin/llama-server"
    assert (built.source, built.commit) == (Path("/src"), "unknown")


def test_a_build_without_a_program_is_named(tmp_path: Path) -> None:
    _fake_build(tmp_path)
    (tmp_path / "bin/llama-perplexity").unlink()
    with pytest.raises(MissingRequirement, match="bin/llama-perplexity is not there"):
        llamacpp.describe(tmp_path)


def test_missing_tools_are_all_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "clang++-99 -stdlib=libc++")
    with pytest.raises(MissingRequirement) as caught:
        llamacpp.ensure(tmp_path / "cache", Console(io.StringIO()))
    assert "cmake, cc (CC), clang++-99 -stdlib=libc++ (CXX), ninja or make" in str(caught.value)


def test_too_little_disk_is_said_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llamacpp, "BYTES_NEEDED", 1 << 60)
    monkeypatch.setattr(llamacpp, "_require_tools", lambda: "Ninja")
    with pytest.raises(MissingRequirement, match="MiB free"):
        llamacpp.ensure(tmp_path, Console(io.StringIO()))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("x.cpp: fatal error: No space left on device", "disk became full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "compiler was killed"),
        ("a.cpp:3:1: error: expected ';'\nninja: build stopped", "a.cpp:3:1: error: expected ';'"),
        ("", "failed with status 1"),
    ],
)
def test_a_failed_build_is_explained(tmp_path: Path, output: str, said: str) -> None:
    log = tmp_path / "build.log"
    log.write_text(output)
    error = llamacpp._build_failed(log, 1)
    assert said in str(error)
    assert str(log) in str(error)


def test_the_second_run_waits_and_says_for_whom(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import io, sys, pathlib\n"
            "from moetuner.demo import llamacpp\n"
            "from moetuner.demo.console import Console\n"
            "with llamacpp._locked(pathlib.Path(sys.argv[1]), Console(io.StringIO())):\n"
            "    print('locked', flush=True)\n"
            "    sys.stdin.read()\n",
            str(tmp_path / "lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(llamacpp.__file__).parents[2],
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "locked\n"

    class Releasing(io.StringIO):
        def write(self, text: str) -> int:
            assert holder.stdin is not None
            if not holder.stdin.closed:
                holder.stdin.close()  # it lets go once we have said that we wait
            return super().write(text)

    said = Releasing()
    with llamacpp._locked(tmp_path / "lock", Console(said)):
        assert f"another run (pid {holder.pid})" in said.getvalue()
    assert holder.wait(10) == 0


def test_the_command_ends_with_the_error_s_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(cache: Path) -> llamacpp.LlamaBuild:
        assert cache == tmp_path
        raise MissingRequirement("no compiler", "install one")

    monkeypatch.setattr(llamacpp, "ensure", fail)
    assert llamacpp.main(["--cache", str(tmp_path)]) == MissingRequirement.exit_code
    assert capsys.readouterr().err == "moetuner: no compiler (install one)\n"


def test_the_directory_changes_with_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = llamacpp._fingerprint()
    monkeypatch.setattr(llamacpp, "_cpu_features", lambda: frozenset({"another"}))
    assert llamacpp._fingerprint() != here
