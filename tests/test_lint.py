"""Linters and the rules of the layout, as tests.

./run-tests lint, or ./run-tests lint -k imports
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moetuner import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moetuner"

# Decisions: state and events in, actions out. They touch no file, clock or process.
DECISIONS = {"activity", "ecmascript", "floor", "floor_events", "moe", "placement"}
# Matching a stranger's pattern takes as long as the stranger likes: it has a time limit.
TOUCHES_ANYWAY = {("placement", "time")}
# What anything may import; these import only each other.
GROUND = {"config", "errors", "log"}
OUTSIDE_WORLD = {"ctypes", "os", "select", "selectors", "signal", "socket", "subprocess"}
OUTSIDE_WORLD |= {"tempfile", "threading", "time"}
# Adapters to one thing each. They never know of each other; daemon and cli compose them.
ADAPTERS = {"board", "watch", "serve"}
SHARED = {"inotify"}  # a system call that adapters have in common
LONGEST = 400  # lines that one reads in a sitting
LONGEST_TEST = 800


def _files() -> list[Path]:
    """All files of the project: what git tracks or would track; without git, all there are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") and (ROOT / ".git").exists():
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode == 0:
            paths = [ROOT / name for name in result.stdout.split("\0") if name]
            return sorted(path for path in paths if path.is_file() and not path.is_symlink())
    return sorted(path for path in ROOT.rglob("*") if path.is_file() and ".git" not in path.parts)


def _run(*command: str) -> None:
    """Runs a linter; its own output is the failure."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{result.stdout}{result.stderr}", pytrace=False)


def test_ruff() -> None:
    _run(sys.executable, "-m", "ruff", "check", "--quiet", ".")


def test_format() -> None:
    _run(sys.executable, "-m", "ruff", "format", "--check", "--quiet", "--diff", ".")


def test_types() -> None:
    _run(sys.executable, "-m", "mypy", "--strict")


def _is_shell(path: Path) -> bool:
    if path.suffix in (".sh", ".bash"):
        return True
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba|da)?sh\b", file.readline(100)))


def test_shell_scripts() -> None:
    scripts = [str(path) for path in _files() if _is_shell(path)]
    assert str(ROOT / "run-tests") in scripts
    _run("shellcheck", *scripts)


def test_executables_are_executable() -> None:
    with_interpreter = [path for path in _files() if path.read_bytes()[:2] == b"#!"]
    assert [str(path) for path in with_interpreter if not os.access(path, os.X_OK)] == []


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports, `from a import b` as a.b; anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is meant"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _modules() -> dict[str, Path]:
    """`board.devfreq` → its file, for all of the package."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if "__pycache__" not in path.parts
    }


def _ours(path: Path) -> set[str]:
    """The package's modules or subpackages (first name only) that a file imports."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("moetuner.")} - {
        "__file__",
        "__version__",
    }


def test_imports_point_inward() -> None:
    wrong = []
    for name, path in _modules().items():
        top = name.split(".")[0]
        if top in DECISIONS | GROUND:
            allowed = GROUND | (DECISIONS if top in DECISIONS else set())
        elif top in ADAPTERS:
            allowed = GROUND | DECISIONS | SHARED | {top}
        elif top in SHARED:
            allowed = GROUND
        else:
            continue
        wrong += [f"{name} imports {other}" for other in sorted(_ours(path) - allowed)]
    assert wrong == []


def test_decisions_touch_nothing() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in _modules().items()
        if name in DECISIONS
        for other in sorted(_names(path) & OUTSIDE_WORLD)
        if (name, other) not in TOUCHES_ANYWAY
    ]
    assert wrong == []


def test_every_decision_module_is_there() -> None:
    assert set(_modules()) >= DECISIONS | GROUND | SHARED


def test_one_module_imports_bcc_and_jtop_is_optional() -> None:
    users = {name for name, path in _modules().items() if "bcc" in _names(path)}
    assert users == {"watch.loader"}
    for path in _modules().values():
        for node in ast.parse(path.read_text()).body:
            top_level = isinstance(node, ast.Import | ast.ImportFrom)
            assert not (top_level and "jtop" in ast.unparse(node)), f"{path} needs jtop"


def _names(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(path)}


def test_the_demonstration_is_no_part_of_the_product() -> None:
    users = [name for name, path in _modules().items() if "demo" in _ours(path)]
    assert [name for name in users if not name.startswith("demo.")] == []


# They import it when they are called, and say so if it is not there.
NEEDS_NUMPY = {"serve.trace"}


def test_the_daemon_needs_no_package_of_the_demonstration() -> None:
    for name, path in _modules().items():
        if not name.startswith("demo."):
            allowed = {"numpy"} if name in NEEDS_NUMPY else set()
            assert not (_names(path) & {"gguf", "numpy"}) - allowed, name
    code = "import sys, moetuner.cli, moetuner.daemon, moetuner.serve.trace; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"gguf", "numpy"} & set(result.stdout.split())


def test_no_file_is_too_long() -> None:
    long = []
    for path in _files():
        if path.suffix in (".py", ".c", ".h", ".cpp", ".sh") or _is_shell(path):
            limit = LONGEST_TEST if "tests" in path.parts else LONGEST
            lines = path.read_text(errors="replace").count("\n")
            if lines > limit:
                long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
    assert long == []


def test_every_test_belongs_to_a_part() -> None:
    text = (ROOT / "run-tests").read_text()
    places = re.findall(r"\btests/[\w.]+", text)
    for path in _files():
        if path.name.startswith("test_") and path.suffix == ".py":
            name = path.relative_to(ROOT).as_posix()
            assert any(name == place or name.startswith(f"{place}/") for place in places), name


def _commands() -> set[str]:
    """The subcommands of moetuner."""
    result = subprocess.run(
        [sys.executable, "-m", "moetuner", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    listed = re.search(r"\n  COMMAND\n((?:    .*\n)+)", result.stdout)
    assert listed, result.stdout
    return set(re.findall(r"^    (\w+)", listed[1], re.MULTILINE))


def test_every_command_s_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    commands = _commands()
    assert {"check", "daemon", "restore", "status"} <= commands
    for command in commands:
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        assert re.search(rf"^ +(sudo )?moetuner {command}", capsys.readouterr().out, re.MULTILINE)


def test_the_readme_s_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    code = "\n".join(_code(text))
    for flag, command in re.findall(r"\bmoetuner (?:--(\w+)|([a-z]+))\b", code):
        assert flag in ("", "check", "help", "version"), f"README.md: moetuner --{flag}"
        assert command in _commands() | {""}, f"README.md: moetuner {command}"
    for script, argument in re.findall(r"\./([\w-]+(?:\.sh)?)(?: (--?[\w-]+))?", code):
        source = ROOT / script
        assert source.is_file(), f"README.md calls ./{script}"
        assert not argument or argument in source.read_text(), f"README.md: {script} {argument}"
    for path in re.findall(
        r"(?<![\w/])(?:docs|etc|benchmarks|tests|probes|systemd)/[\w./-]*\w", text
    ):
        assert (ROOT / path).exists(), f"README.md names {path}"


def _code(markdown: str) -> list[str]:
    """Fenced blocks and inline code."""
    found = re.findall(r"```\w*\n(.*?)```|`([^`\n]+)`", markdown, re.DOTALL)
    return [block or inline for block, inline in found]


def _man_pages() -> list[Path]:
    return [path for path in _files() if re.fullmatch(r"moetuner[\w.-]*\.[1-8]", path.name)]


def test_man_pages() -> None:
    pages = _man_pages()
    assert pages, "there is no man page"
    for page in pages:
        _run("mandoc", "-T", "lint", "-W", "warning", str(page))
    text = "\n".join(page.read_text() for page in pages)
    for command in _commands():
        assert re.search(rf"\b{command}\b", text), f"the man page says nothing of {command}"


def test_completion_knows_every_command() -> None:
    files = [path for path in _files() if "completion" in str(path.relative_to(ROOT))]
    assert files, "there is no bash completion"
    text = "\n".join(path.read_text() for path in files)
    for command in _commands():
        assert re.search(rf"\b{command}\b", text), f"the completion does not know {command}"
