"""probes/inference.h and moetuner/watch/layout.py say the same."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path

import pytest

from moetuner.watch import layout
from moetuner.watch.program import PROBE_DIR

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "event": layout.Event,
    "process_state": layout.ProcessState,
    "thread_state": layout.ThreadState,
}
PREFIXES = ("FN_", "EVENT_", "VERDICT_", "SETTING_", "COUNTER_")


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Names of the header → numbers, as a compiler sees them: `event` is the struct's size,
    `event.pid` the offset of a field."""
    text = (PROBE_DIR / "inference.h").read_text()
    lines = [line.split() for line in text.splitlines()]
    names = [w[1] for w in lines if w[:1] == ["#define"] and w[1].startswith(PREFIXES)]
    names = [name for name in names if name != "FN_COUNT"]
    expressions = {name: name for name in [*names, "FN_COUNT"]}
    for struct, kind in STRUCTS.items():
        expressions[struct] = f"sizeof(struct {struct})"
        for field in fields(kind):
            expressions[f"{struct}.{field}"] = f"offsetof(struct {struct}, {field})"
    printed = "\n".join(
        f'printf("%s\\"{name}\\": %lu", separator, (unsigned long)({expression})); '
        'separator = ", ";'
        for name, expression in expressions.items()
    )
    source = tmp_path_factory.mktemp("layout") / "layout.c"
    source.write_text(f"""
        #include <stddef.h>
        #include <stdio.h>
        typedef unsigned long long u64;
        typedef unsigned int u32;
        #include "inference.h"
        int main(void) {{
            const char *separator = "{{";
            {printed}
            printf("}}");
            return 0;
        }}""")
    program = source.with_suffix("")
    subprocess.run(["gcc", f"-I{PROBE_DIR}", str(source), "-o", str(program)], check=True)
    numbers: dict[str, int] = json.loads(subprocess.check_output([str(program)]))
    return numbers


def fields(kind: type[ctypes.Structure]) -> list[str]:
    return [field[0] for field in kind._fields_]


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs(header: dict[str, int], struct: str) -> None:
    kind = STRUCTS[struct]
    ours = {name: getattr(kind, name).offset for name in fields(kind)}
    assert ours == {name: header[f"{struct}.{name}"] for name in ours}
    assert ctypes.sizeof(kind) == header[struct]


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_is_known(struct: str) -> None:
    text = (PROBE_DIR / "inference.h").read_text()
    body = text.split(f"struct {struct} {{")[1].split("}")[0]
    declared = [
        line.split(";")[0].split()[-1].split("[")[0] for line in body.splitlines() if ";" in line
    ]
    assert declared == fields(STRUCTS[struct])


def test_constants(header: dict[str, int]) -> None:
    functions = [name.removeprefix("llama_").upper() for name in layout.FUNCTIONS]
    ours = {f"FN_{name}": number for number, name in enumerate(functions)}
    ours["FN_COUNT"] = layout.FN_COUNT
    ours |= {name: getattr(layout, name) for name in dir(layout) if name.startswith(PREFIXES[1:])}
    ours["SETTING_COUNT"] = 1
    ours["COUNTER_COUNT"] = 4
    assert ours == {name: n for name, n in header.items() if name.startswith(PREFIXES)}


@pytest.mark.parametrize("name", [*layout.UPROBE_PROGRAMS, *layout.TRACEPOINT_PROGRAMS])
def test_programs_exist(name: str) -> None:
    assert f"int {name}(" in (Path(PROBE_DIR) / "inference.bpf.c").read_text()
