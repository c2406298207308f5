"""Every failure of bcc becomes one sentence and what to do about it."""

from __future__ import annotations

import builtins
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from moetuner.errors import MissingRequirement, MoetunerError, SystemRefused
from moetuner.watch import headers, loader

SOURCE = headers.Headers("foreign", Path("/usr/src/linux-headers-1"))
LOAD = "Failed to load BPF program b'enter_decode': "

# what bcc raises, what it printed, our class, words of the message, words of the hint
FAILURES: dict[str, tuple[str, list[str], type[MoetunerError], str, str]] = {
    "not permitted": (LOAD + "Operation not permitted", [], MissingRequirement, "root", "sudo"),
    "denied": (LOAD + "Permission denied", [], MissingRequirement, "root", "sudo"),
    "no eBPF": (
        LOAD + "Function not implemented",
        [],
        MissingRequirement,
        "no eBPF",
        "CONFIG_BPF_SYSCALL",
    ),
    "no headers": (
        "Failed to compile BPF module <text>",
        ["Unable to find kernel headers. Try rebuilding kernel with CONFIG_IKHEADERS=m"],
        MissingRequirement,
        "linux-headers-1",
        "install kernel headers",
    ),
    "a header is missing": (
        "Failed to compile BPF module <text>",
        ["x.c:1:10: fatal error: 'linux/kconfig.h' file not found", "1 error generated."],
        MissingRequirement,
        "linux/kconfig.h",
        "install kernel headers",
    ),
    "syntax": (
        "Failed to compile BPF module <text>",
        ["/virtual/main.c:9:1: error: unknown type name 'nonsense'", "1 error generated."],
        SystemRefused,
        "main.c:9:1: error: unknown type name 'nonsense'",
        "",
    ),
    "verifier": (
        LOAD + "Permission denied",
        ["R0 invalid mem access 'map_value_or_null'", "processed 9 insns (limit 1000000)"],
        SystemRefused,
        "R0 invalid mem access",
        "",
    ),
    "anything else": ("Unknown program b'leave_site'", [], SystemRefused, "leave_site", ""),
}


@pytest.mark.parametrize(
    ("raised", "printed", "kind", "message", "hint"), FAILURES.values(), ids=FAILURES
)
def test_explain(
    monkeypatch: pytest.MonkeyPatch,
    raised: str,
    printed: list[str],
    kind: type[MoetunerError],
    message: str,
    hint: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    error = loader.explain(Exception(raised), printed, SOURCE)
    assert type(error) is kind
    assert message in error.message
    assert hint in (error.hint or "")
    assert "\n" not in str(error)


def test_root_without_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    error = loader.explain(Exception(LOAD + "Operation not permitted"), [], SOURCE)
    assert isinstance(error, MissingRequirement)
    assert "CAP_SYS_ADMIN" in (error.hint or "")


@pytest.mark.parametrize(
    "problem",
    [
        ImportError("No module named 'bcc'"),
        OSError("libbcc.so.0: cannot open shared object file"),
    ],
    ids=["no bcc", "no libbcc"],
)
def test_bcc_is_missing(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    real = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> types.ModuleType:
        if name == "bcc":
            raise problem
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(MissingRequirement) as caught:
        loader.compile_probe(Path("/nowhere"), SOURCE)
    assert str(problem) in caught.value.message
    assert caught.value.hint == loader.BCC_HINT
