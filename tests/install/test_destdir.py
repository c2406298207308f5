"""install.sh into a directory, as packagers use it, as root and as an ordinary user."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.system import NOBODY, Result, checkout, installed_files
from tests.support.machine import cannot

CONFIG = "etc/moetuner/moetuner.yaml"


class Below:
    """A checkout and a DESTDIR, both the user's who runs install.sh."""

    def __init__(self, base: Path, user: int | None) -> None:
        self.user = user
        self.source = checkout(base / "checkout")
        self.destdir = base / "destdir"

    def install(self, *arguments: str) -> Result:
        return self._run(self.source / "install.sh", *arguments)

    def moetuner(self, *arguments: str) -> Result:
        return self._run(self.destdir / "opt/moetuner/bin/moetuner", *arguments)

    def _run(self, *command: str | Path) -> Result:
        return subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], "DESTDIR": str(self.destdir)},
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else [],
        )

    def files(self) -> set[str]:
        return installed_files(self.destdir)

    def config(self) -> Path:
        return self.destdir / CONFIG


@pytest.fixture(params=["as we are", "an ordinary user"])
def below(request: pytest.FixtureRequest) -> Iterator[Below]:
    user = None
    if request.param == "an ordinary user":
        if os.geteuid() != 0:
            cannot("not root: the first variant is an ordinary user already")
        user = NOBODY
    with tempfile.TemporaryDirectory(prefix="moetuner-test-", dir="/tmp") as name:
        base = Path(name)
        if user is not None:
            os.chown(base, user, user)
        yield Below(base, user)


def ok(result: Result) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_tree(below: Below) -> None:
    assert ok(below.install()) == f"Installed below {below.destdir}\n"
    files = below.files()
    expected = {
        *("usr/local/bin/moetuner", "usr/local/share/man/man8/moetuner.8"),
        *("usr/local/share/bash-completion/completions/moetuner",),
        *("etc/systemd/system/moetuner.service", CONFIG),
        *("opt/moetuner/bin/moetuner", "opt/moetuner/manifest", "opt/moetuner/shipped.yaml"),
        "opt/moetuner/lib",
    }
    assert expected <= files
    rest = {f for f in files - expected if not re.match(r"opt/moetuner/(venv|lib\.\w+)/", f)}
    assert rest == set()
    link = below.destdir / "usr/local/bin/moetuner"
    assert os.readlink(link) == "/opt/moetuner/bin/moetuner"
    program = below.destdir / "opt/moetuner/lib"
    assert (program / "probes/inference.bpf.c").is_file()
    assert list(program.glob("moetuner/__pycache__/cli.*.pyc"))
    # Others must be able to run it; nobody else may change it.
    for path in [below.destdir, *below.destdir.rglob("*")]:
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            assert mode in ((0o755,) if path.is_dir() else (0o644, 0o755)), path


def test_nothing_in_it_names_the_directory(below: Below) -> None:
    ok(below.install())
    named = [
        path
        for path in below.destdir.rglob("*")
        if path.is_file() and os.fsencode(below.destdir) in path.read_bytes()
    ]
    assert named == []


def test_it_runs_where_it_lies_and_takes_nothing_from_the_caller(below: Below) -> None:
    ok(below.install())
    assert re.fullmatch(r"moetuner [\d.]+\n", ok(below.moetuner("--version")))
    trap = below.destdir / "trap"
    (trap / "moetuner").mkdir(parents=True)
    (trap / "moetuner/__init__.py").write_text("raise SystemExit('the wrong one')")
    result = subprocess.run(
        [below.destdir / "opt/moetuner/bin/moetuner", "--version"],
        capture_output=True,
        text=True,
        cwd=trap,
        env={"PYTHONPATH": str(trap), "PATH": os.environ["PATH"]},
    )
    assert ok(result).startswith("moetuner ")


def test_again_is_the_same(below: Below) -> None:
    ok(below.install())
    before = {f: os.lstat(below.destdir / f).st_mtime_ns for f in below.files()}
    ok(below.install())
    after = {f: os.lstat(below.destdir / f).st_mtime_ns for f in below.files()}
    assert before.keys() == after.keys()
    assert {f for f in before if before[f] != after[f]} == set(), "written again"


def test_an_upgrade_leaves_no_old_file(below: Below) -> None:
    old_module = below.source / "moetuner/old.py"
    old_module.write_text("")
    ok(below.install())
    assert any(f.endswith("/moetuner/old.py") for f in below.files())
    old_module.unlink()
    ok(below.install())
    assert [f for f in below.files() if "/old." in f] == []
    assert len(list(below.destdir.glob("opt/moetuner/lib.*"))) == 1


def test_one_that_fails_leaves_the_old_one_working(below: Below) -> None:
    ok(below.install())
    before = below.files()
    (below.source / "moetuner/floor.py").write_text("def broken(:\n")
    result = below.install()
    assert result.returncode == 4
    assert "does not compile" in result.stderr
    assert below.files() == before
    assert ok(below.moetuner("--version")).startswith("moetuner ")


def test_one_that_was_killed_is_cleared_up_by_the_next(below: Below) -> None:
    ok(below.install())
    for left in ("lib.abcdef", "venv.abcdef"):
        (below.destdir / "opt/moetuner" / left).mkdir()
    (below.destdir / "opt/moetuner/lib.link").symlink_to("lib.abcdef")
    (below.source / "moetuner/errors.py").write_text(
        (below.source / "moetuner/errors.py").read_text() + "# newer\n"
    )
    ok(below.install())
    assert not list(below.destdir.glob("opt/moetuner/*.abcdef"))
    assert not list(below.destdir.glob("opt/moetuner/lib.link"))
    assert len(list(below.destdir.glob("opt/moetuner/lib.*"))) == 1


def test_an_environment_of_another_python_is_replaced(below: Below) -> None:
    ok(below.install())
    (packages,) = below.destdir.glob("opt/moetuner/venv/lib/python3*/site-packages")
    (packages / "somebody_s.py").write_text("")
    ok(below.install())
    assert (packages / "somebody_s.py").exists(), "kept: it is for this Python"
    packages.parent.rename(packages.parent.with_name("python3.1"))
    ok(below.install())
    assert [p.name for p in below.destdir.glob("opt/moetuner/venv/lib/*")] == [packages.parent.name]
    assert ok(below.moetuner("--version")).startswith("moetuner ")


def test_another_prefix(below: Below) -> None:
    ok(below.install())
    ok(below.install("--prefix", "/usr"))
    files = below.files()
    assert {"usr/bin/moetuner", "usr/lib/systemd/system/moetuner.service"} <= files
    assert "usr/share/man/man8/moetuner.8" in files
    assert [f for f in files if f.startswith(("usr/local/bin", "etc/systemd/system/m"))] == [
        "usr/local/bin"
    ], "what the other prefix had is gone"
    ok(below.install("--purge"))
    assert below.files() == set()


def test_a_changed_configuration_is_kept(below: Below) -> None:
    ok(below.install())
    shipped = below.config().read_text()
    below.config().write_text(shipped + "# mine\n")
    assert "You changed" not in ok(below.install()), "nothing new is shipped"
    assert not below.config().with_suffix(".yaml.new").exists()

    new = shipped + "# new in this version\n"
    (below.source / "etc/moetuner.yaml").write_text(new)
    output = ok(below.install())
    assert "You changed /etc/moetuner/moetuner.yaml: it is kept" in output
    assert below.config().read_text() == shipped + "# mine\n"
    assert below.config().with_suffix(".yaml.new").read_text() == new

    below.config().write_text(new)  # the user merged them
    ok(below.install())
    assert not below.config().with_suffix(".yaml.new").exists()


def test_an_unchanged_configuration_is_replaced(below: Below) -> None:
    ok(below.install())
    new = below.config().read_text() + "# new in this version\n"
    (below.source / "etc/moetuner.yaml").write_text(new)
    ok(below.install())
    assert below.config().read_text() == new
    assert [f for f in below.files() if f.startswith("etc/moetuner/")] == [CONFIG]


def test_a_configuration_that_is_a_link_is_kept(below: Below) -> None:
    ok(below.install())
    target = below.destdir / "elsewhere.yaml"
    below.config().rename(target)
    below.config().symlink_to("../../elsewhere.yaml")
    (below.source / "etc/moetuner.yaml").write_text("# new\n")
    ok(below.install())
    assert below.config().is_symlink()
    assert target.read_text() != "# new\n"


def test_uninstall_leaves_the_configuration_only(below: Below) -> None:
    ok(below.install())
    output = ok(below.install("--uninstall"))
    assert output.splitlines()[0] == "moetuner is removed"
    assert below.files() == {CONFIG}
    assert ok(below.install("--uninstall")).splitlines()[0] == "moetuner is not installed"


def test_purge_leaves_nothing(below: Below) -> None:
    ok(below.install())
    ok(below.install("--purge"))
    assert below.files() == set()
    assert list(below.destdir.iterdir()) == []


def test_directories_of_others_stay(below: Below) -> None:
    ok(below.install())
    other = below.destdir / "usr/local/bin/other"
    other.write_text("")
    ok(below.install("--purge"))
    assert below.files() == {"usr/local/bin/other"}
