"""Who counts: verdicts on command lines, variables and executables.

Ids begin with the number of the case where one stands behind it.
Alone: python -m pytest tests/unit/test_moe.py
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetuner.config import MatchConfig
from moetuner.moe import ARGUMENTS_LIMIT, NOTHING, Verdict, judge

SERVER = "/opt/llama.cpp/bin/llama-server"
USUAL = (SERVER, "-m", "/models/model.gguf", "-ngl", "99", "-c", "32768", "--jinja")
DEFAULT = MatchConfig()


def of(
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    exe: str = SERVER,
    match: MatchConfig = DEFAULT,
) -> Verdict:
    return judge((*USUAL, *arguments), environ or {}, exe, match)


def of_argv(
    argv: Sequence[str], exe: str = "", environ: Mapping[str, str] | None = None
) -> Verdict:
    return judge(argv, environ or {}, exe, DEFAULT)


FIRST = "blk.0.ffn_up_exps.weight"
TENTH = "-ot sends blk.10.ffn_up_exps.weight to CPU"
NONE_BY = "no expert is kept on the CPU by "


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cpu-moe"], "--cpu-moe"),
        (["-cmoe"], "-cmoe"),
        (["--cpu_moe"], "--cpu-moe"),
        (["--n-cpu-moe", "30"], "--n-cpu-moe 30"),
        pytest.param(["-ncmoe", "30"], "-ncmoe 30", id="case 4: short flag"),
        (["--n_cpu_moe", "1"], "--n-cpu-moe 1"),
        (["--n-cpu-moe=30"], "--n-cpu-moe 30"),
        (["-ncmoe", " +030 layers"], "-ncmoe  +030 layers"),
        (["-ncmoe", "99999"], "-ncmoe 99999"),
        (["-ncmoe", "0", "-ncmoe", "2"], "-ncmoe 2"),
        (["-cmoed"], "-cmoed"),
        (["--cpu-moe-draft"], "--cpu-moe-draft"),
        (["--spec-draft-cpu-moe"], "--spec-draft-cpu-moe"),
        (["-ncmoed", "4"], "-ncmoed 4"),
        (["--spec-draft-ncmoe", "4"], "--spec-draft-ncmoe 4"),
        (["--spec-draft-n-cpu-moe", "4"], "--spec-draft-n-cpu-moe 4"),
        (["-otd", "exps=CPU"], f"-otd sends {FIRST} to CPU"),
        (["-ot", "exps=CPU"], f"-ot sends {FIRST} to CPU"),
        (["--override-tensor", "exps=CPU"], f"--override-tensor sends {FIRST} to CPU"),
        (["--override_tensor=exps=CPU"], f"--override-tensor sends {FIRST} to CPU"),
        pytest.param(
            ["-ot", r"\.ffn_(up|down)_exps\.=CPU"],
            f"-ot sends {FIRST} to CPU",
            id="case 7: up|down",
        ),
        pytest.param(
            ["-ot", r"blk\.(2[0-9])\..*_exps.*=CPU,token_embd=CUDA0"],
            "-ot sends blk.20.ffn_up_exps.weight to CPU",
            id="case 7: layers 20 to 29",
        ),
        (["-ot", ".*=CPU"], f"-ot sends {FIRST} to CPU"),
        (["-ot", "^blk=CPU"], f"-ot sends {FIRST} to CPU"),
        (["-ot", r"gate_up_exps\.weight$=CPU"], "-ot sends blk.0.ffn_gate_up_exps.weight to CPU"),
        (["-ot", "_chexps=CPU"], "-ot sends blk.0.ffn_up_chexps.weight to CPU"),
        (["-ot", r"blk\.511\.=CPU"], "-ot sends blk.511.ffn_up_exps.weight to CPU"),
        # what the expert cache is given
        (["-ot", r"\.ffn_(up|down|gate)_exps=MOETUNER"], f"-ot sends {FIRST} to MOETUNER"),
        # the first pattern found decides, and only for the tensors in which it is found
        (["-ot", r"blk\.[0-9]\.=CUDA0,exps=CPU"], TENTH),
        (
            ["-ot", r"blk\.[0-9]\.=CUDA0", "-ot", "exps=CPU"],
            TENTH,
        ),
        (["-ot", r"_(up|gate)_exps=CUDA0", "-cmoe"], "-cmoe"),
        (["-ot", r"blk\.[0-9]\.=CUDA0", "-ncmoe", "11"], "-ncmoe 11"),
        (["-ncmoe", "5", "-ot", "exps=CUDA0"], "-ncmoe 5"),
        (["-cmoe", "-ot", "exps=CUDA0"], "-cmoe"),
        (["-otd", "exps=CUDA0", "-ot", "exps=CPU"], f"-ot sends {FIRST} to CPU"),
        # a pattern that is not understood does not hide another
        (["-ot", "x[=CUDA0,exps=CPU"], f"-ot sends {FIRST} to CPU"),
        (["-ot", "x[=CPU", "--cpu-moe"], "--cpu-moe"),
        (["-ot", ",,exps=CPU,"], f"-ot sends {FIRST} to CPU"),
        (["-p", "--cpu-moe", "-cmoe"], "-cmoe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_counts(arguments: list[str], reason: str) -> None:
    assert of(*arguments) == Verdict(True, reason)


def none(*notes: str) -> str:
    return NOTHING + (f" ({'; '.join(notes)})" if notes else "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param([], none(), id="no flag"),
        pytest.param(
            ["--n-cpu-moe", "0"], none("--n-cpu-moe 0 keeps none"), id="case 6: --n-cpu-moe 0"
        ),
        (["-ncmoe", "-1"], none("-ncmoe -1 is not a number of layers")),
        (["-ncmoe", "all"], none("-ncmoe all is not a number of layers")),
        (
            ["-ncmoe", "99999999999999999999"],
            none("-ncmoe 99999999999999999999 is not a number of layers"),
        ),
        (["-ncmoe"], none("-ncmoe has no value")),
        (["-ncmoe", "--cpu-moe"], none("-ncmoe --cpu-moe is not a number of layers")),
        (["--cpu-moe=false"], none()),
        pytest.param(["-ot", r"attn=CPU"], NONE_BY + "-ot", id="case 7: attention only"),
        (["-ot", r"blk\.[0-9]+\.attn_.*=CPU,exps=CUDA0"], NONE_BY + "-ot"),
        (["-ot", r"_shexp=CPU"], NONE_BY + "-ot"),
        (["-ot", r"exps\.bias=CPU"], NONE_BY + "-ot"),
        (["-ot", r"ffn_(up|down|gate)\.=CPU"], NONE_BY + "-ot"),
        (["-ot", r"blk\.512\.=CPU"], NONE_BY + "-ot"),
        (["-ot", "exps=CUDA0,.*=CPU"], NONE_BY + "-ot"),
        (["-ot", "exps=CUDA0", "--cpu-moe"], NONE_BY + "-ot, --cpu-moe"),
        (
            ["-ot", r"blk\.[0-9]\.=CUDA0", "-ncmoe", "10"],
            NONE_BY + "-ot, -ncmoe 10",
        ),
        (["-ot", "exps=cpu"], NONE_BY + "-ot"),
        (["-ot", "(?!)=CPU"], NONE_BY + "-ot"),
        (["-ncffn", "8"], NONE_BY + "-ncffn 8"),
        (["-ot", "exps"], none("-ot: exps is not pattern=buffer type")),
        (["-ot"], none("-ot has no value")),
        (
            ["-ot", "exps[=CPU"],
            NONE_BY + "-ot (-ot: exps[ is not a pattern for tensor names ([ is not understood))",
        ),
        (
            ["-ot", "[z-a]exps=CPU"],
            NONE_BY + "-ot ("
            "-ot: [z-a]exps is not a pattern for tensor names (bad character range at position 7))",
        ),
        # the value of another option
        (["-p", "--cpu-moe"], none()),
        (["--prompt", "-cmoe"], none()),
        (["--alias", "--cpu-moe"], none()),
        (["-sys", "--cpu-moe"], none()),
        (["-p", "use --cpu-moe"], none()),
        (["cpu-moe", "--cpu-moes", "-cpu-moe", "-n_cpu_moe", "3"], none()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_does_not_count(arguments: list[str], reason: str) -> None:
    assert of(*arguments) == Verdict(False, reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        pytest.param("LLAMA_ARG_CPU_MOE", "1", "LLAMA_ARG_CPU_MOE=1", id="case 5: CPU_MOE"),
        ("LLAMA_ARG_CPU_MOE", "on", "LLAMA_ARG_CPU_MOE=on"),
        ("LLAMA_ARG_CPU_MOE", "true", "LLAMA_ARG_CPU_MOE=true"),
        ("LLAMA_ARG_CPU_MOE", "enabled", "LLAMA_ARG_CPU_MOE=enabled"),
        pytest.param("LLAMA_ARG_N_CPU_MOE", "30", "LLAMA_ARG_N_CPU_MOE=30", id="case 5: N_CPU_MOE"),
        pytest.param(
            "LLAMA_ARG_OVERRIDE_TENSOR",
            "exps=CPU",
            f"LLAMA_ARG_OVERRIDE_TENSOR sends {FIRST} to CPU",
            id="case 5: OVERRIDE_TENSOR",
        ),
        ("LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "1", "LLAMA_ARG_SPEC_DRAFT_CPU_MOE=1"),
        ("LLAMA_ARG_CPU_MOE_DRAFT", "1", "LLAMA_ARG_CPU_MOE_DRAFT=1"),
        ("LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", "3", "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE=3"),
        ("LLAMA_ARG_N_CPU_MOE_DRAFT", "3", "LLAMA_ARG_N_CPU_MOE_DRAFT=3"),
    ],
)
def test_variables_count(name: str, value: str, reason: str) -> None:
    assert of(environ={name: value}) == Verdict(True, reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        pytest.param("LLAMA_ARG_N_CPU_MOE", "", none(), id="case 6: empty N_CPU_MOE is unset"),
        pytest.param("LLAMA_ARG_CPU_MOE", "", none(), id="case 6: empty CPU_MOE is unset"),
        pytest.param("LLAMA_ARG_OVERRIDE_TENSOR", "", none(), id="case 6: empty OVERRIDE_TENSOR"),
        pytest.param(
            "LLAMA_ARG_N_CPU_MOE", "0", none("LLAMA_ARG_N_CPU_MOE=0 keeps none"), id="case 6: 0"
        ),
        ("LLAMA_ARG_CPU_MOE", "0", none()),
        ("LLAMA_ARG_CPU_MOE", "off", none()),
        ("LLAMA_ARG_CPU_MOE", "disabled", none()),
        ("LLAMA_ARG_CPU_MOE", "True", none("LLAMA_ARG_CPU_MOE=True is not true")),
        ("LLAMA_ARG_CPU_MOE", "yes", none("LLAMA_ARG_CPU_MOE=yes is not true")),
        ("LLAMA_ARG_N_CPU_MOE", "-3", none("LLAMA_ARG_N_CPU_MOE=-3 is not a number of layers")),
        (
            "LLAMA_ARG_OVERRIDE_TENSOR",
            "attn=CPU",
            NONE_BY + "LLAMA_ARG_OVERRIDE_TENSOR",
        ),
        ("LLAMA_CPU_MOE", "1", none()),
    ],
)
def test_variables_that_do_not_count(name: str, value: str, reason: str) -> None:
    assert of(environ={name: value}) == Verdict(False, reason)


def test_variables_come_before_the_command_line() -> None:
    assert (
        of("-ot", "exps=CUDA0", environ={"LLAMA_ARG_CPU_MOE": "1"}).reason == "LLAMA_ARG_CPU_MOE=1"
    )
    assert not of("-cmoe", environ={"LLAMA_ARG_OVERRIDE_TENSOR": "exps=CUDA0"}).counts
    # among themselves in llama.cpp's order, whatever that of the environment
    assert not of(
        environ={"LLAMA_ARG_CPU_MOE": "1", "LLAMA_ARG_OVERRIDE_TENSOR": "exps=CUDA0"}
    ).counts


def test_case_4_the_router_s_child_is_judged_not_its_parent() -> None:
    parent = [SERVER, "--models-preset", "/etc/models.ini", "--models-dir", "/models"]
    child = [SERVER, "--host", "127.0.0.1", "--port", "40001", "--alias", "q", "-ncmoe", "30"]
    assert of_argv(child, SERVER) == Verdict(True, "-ncmoe 30")
    assert of_argv(parent, SERVER) == Verdict(False, NOTHING)


def test_case_10_a_container_changes_nothing() -> None:
    # In another mount namespace the executable is a path of the container's, and the
    # environment is the process's own, which the image or the orchestrator set.
    verdict = of_argv(
        ["/app/llama-server", "-m", "/m.gguf"], "/app/llama-server", {"LLAMA_ARG_CPU_MOE": "1"}
    )
    assert verdict == Verdict(True, "LLAMA_ARG_CPU_MOE=1")


@pytest.mark.parametrize(
    ("argv", "counts"),
    [
        (["llama", "serve", "-m", "x.gguf", "--cpu-moe"], True),
        (["python3", "-m", "llama_cpp.server", "--n_cpu_moe", "12"], True),
        (["python3", "-m", "llama_cpp.server", "--model", "x.gguf"], False),
        (["/usr/bin/ollama", "runner", "--model", "blob", "--port", "4000"], False),
        (["ollama-llama-server", "--model", "blob", "-ot", "exps=CPU"], True),
        (["--cpu-moe"], False),  # argv[0] is a name, not an option
        ([], False),
        ([""], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_of_other_programs(argv: list[str], counts: bool) -> None:
    assert of_argv(argv).counts is counts


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (["-ncmoe", "0,10"], True),
        (["-ncmoe", "0-40+10"], True),
        (["-ncmoe", "0"], False),
        (["-ncmoe", "0,0"], False),
        (["-ncmoe", "x"], False),
        (["-ot", "attn=CPU;exps=CPU"], True),
        (["-ot", "exps=CUDA0;exps=CPU"], False),
        (["-ot", "exps=CUDA0,exps=CPU"], True),  # two runs
        (["-ot", "exps=CUDA0", "-ot", "exps=CPU"], True),
        (["-ot", "exps=CUDA0", "-ncmoe", "9"], False),
        (["-ot", "exps=CUDA0,", "-ncmoe", "9"], True),  # the second run has no override
        (["-ot", "attn=CPU"], False),
        (["-p", "512", "-n", "128"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("argv", [["./llama-bench"], ["llama", "bench"]], ids=" ".join)
def test_llama_bench_has_a_parser_of_its_own(
    argv: list[str], arguments: list[str], counts: bool
) -> None:
    assert of_argv([*argv, *arguments]).counts is counts
    # and reads no LLAMA_ARG_ variables
    assert of_argv([*argv, *arguments], environ={"LLAMA_ARG_CPU_MOE": "1"}).counts is counts


def test_flags_from_the_configuration() -> None:
    match = MatchConfig(flags=("--moe_cpu", "-moecpu"))
    assert of("--moe-cpu", "4", match=match) == Verdict(True, "match.flags: --moe-cpu")
    assert of("--moe_cpu=4", match=match) == Verdict(True, "match.flags: --moe-cpu")
    assert of("-moecpu", match=match).counts
    assert not of("--moe-cpus", match=match).counts
    # llama.cpp takes an underscore for a dash after two dashes only
    assert of("-a_b", match=MatchConfig(flags=("-a_b",))).counts
    assert not of("-a-b", match=MatchConfig(flags=("-a_b",))).counts
    assert not of("-p", "--moe-cpu", match=match).counts


def test_tensors_from_the_configuration() -> None:
    match = MatchConfig(tensors=("blk.*.ffn_up.weight", "layers.*.experts"))
    reason = "-ot sends blk.7.ffn_up.weight to CPU"
    assert of("-ot", r"blk\.7\.ffn_up\.=CPU", match=match) == Verdict(True, reason)
    assert of("-ncffn", "8", match=match) == Verdict(True, "-ncffn 8")
    assert of("-ot", "experts$=CPU", match=match).reason == "-ot sends layers.0.experts to CPU"
    assert not of("-ot", r"ffn_up\.=CUDA0", "-ncffn", "8", match=match).counts
    # --n-cpu-moe is about blocks, --cpu-moe about any name
    other = MatchConfig(tensors=("layers.*.ffn_up_exps.weight",))
    assert not of("-ot", "^blk=CUDA0", "-ncmoe", "5", match=other).counts
    assert of("-ot", "^blk=CUDA0", "-cmoe", match=other).counts
    # A line feed in a name would shift all the others.
    odd = MatchConfig(tensors=("a\nb",))
    assert of("-ot", r"blk\.9\..*up_exps=CPU", match=odd).reason.endswith(
        "9.ffn_up_exps.weight to CPU"
    )


def test_buffer_types_from_the_configuration() -> None:
    match = MatchConfig(buffer_types=("CPU", "CUDA*_Host", "MINE"))
    assert of("-ot", "exps=MINE", match=match).counts
    assert of("-ot", "exps=CUDA0_Host", match=match).counts
    assert not of("-ot", "exps=CUDA0", match=match).counts
    assert not of("-ot", "exps=MINE", match=MatchConfig()).counts
    assert not of("--cpu-moe", match=MatchConfig(buffer_types=("MINE",))).counts


@pytest.mark.parametrize(
    ("pattern", "exe", "hit"),
    [
        ("llama-server", SERVER, True),
        ("llama-*", SERVER, True),
        (SERVER, SERVER, True),
        (SERVER, SERVER + " (deleted)", True),
        ("llama-server", SERVER + " (deleted)", True),
        ("/opt/*/llama-server", SERVER, True),
        ("server", SERVER, False),
        ("/llama-server", SERVER, False),
        ("llama-server", "", False),
        ("llama-server", "/opt/llama-server/python3", False),
    ],
)
def test_always_and_never(pattern: str, exe: str, hit: bool) -> None:
    always = of(exe=exe, match=MatchConfig(always=(pattern,)))
    assert always == (Verdict(True, f"match.always: {pattern}") if hit else Verdict(False, NOTHING))
    never = of("--cpu-moe", exe=exe, match=MatchConfig(never=(pattern,)))
    assert never == (
        Verdict(False, f"match.never: {pattern}") if hit else Verdict(True, "--cpu-moe")
    )


def test_never_beats_always_beats_flags() -> None:
    both = MatchConfig(always=("llama-server",), never=("llama-*",))
    assert of("--cpu-moe", match=both) == Verdict(False, "match.never: llama-*")
    always = MatchConfig(always=("llama-server",), flags=("--x",))
    assert of("--x", match=always).reason == "match.always: llama-server"


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*(.*)*(.*)*[A-Z]",
        "((.|.)*)*[A-Z]",
        "((|.)*)*[A-Z]",
        "(" * 29 + ".*" + ")*" * 29 + "[A-Z]",
        "(.?.?.?.?.?){60}[A-Z]",
    ],
)
def test_an_endless_search_is_given_up(pattern: str) -> None:
    verdict = of("-ot", f"{pattern}=CPU")
    assert not verdict.counts
    assert f"-ot: {pattern[:40]} takes too long" in verdict.reason
    # nor is there time for others
    verdict = of("-ot", f"{pattern}=CPU,exps$=CPU")
    assert "; -ot: exps$ was not tried: there was no time left" in verdict.reason
    # and it is no place to hide behind
    assert of("-ot", f"{pattern}=CUDA0", "-cmoe") == Verdict(True, "-cmoe")


BOMBS = r"""
import resource
limit = 512 * 1024 * 1024
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from moetuner.config import MatchConfig
from moetuner.moe import judge
many = [f"a{n}" for n in range(9000)]
for value in (
    "(x{9999}){9999}=CPU", "(x{255}){255}=CPU", "(" * 4000 + "=CPU", "[" * 4000 + "=CPU",
    "(?:x{2}){2}" * 300 + "=CPU", "((x{70}){70}|" * 20 + "=CPU", "(|.){4999}[A-Z]=CPU",
    "=CPU," * 6000, ",".join(f"{name}=CPU" for name in many)[:32000], "a" * 1_000_000,
    "(.{1}" * 28 + ")" * 28 + "[A-Z]=CPU", "\\" * 4095 + "=CPU", "[[:" * 1300 + "=CPU",
):
    print(judge(["s", "-ot", value], {}, "", MatchConfig()).counts)
commas = "," * 32000
print(judge(["llama-bench", "-ot", commas, *["-ncmoe", "0"] * 2000], {}, "", MatchConfig()).counts)
counts = [part for n in range(2000) for part in ("-ncmoe", str(n))]
print(judge(["s", "-ot", "exps=CUDA0", *counts], {}, "", MatchConfig()).counts)
"""


def test_bombs_cost_no_memory() -> None:
    # An address space of 512 MiB: what unfolds, ends in MemoryError or a signal. The one
    # that counts is the empty pattern, which is found in every name.
    done = subprocess.run(
        [sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"] * 7 + ["True"] + ["False"] * 7


def test_patterns_are_read_up_to_a_limit() -> None:
    some = "zz=CPU," * 900
    assert of("-ot", some + "exps=CPU").counts
    verdict = of("-ot", some * 6)
    assert verdict == Verdict(False, none("-ot is too long to be read"))
    assert not of(*["-ot", some] * 5, "-ot", some + "exps=CPU").counts


def test_verdicts_leave_nothing_behind() -> None:
    # The package would keep compiled patterns, and a process can start as many children
    # with new ones as it likes. Sixty patterns of 300 characters would be 20 KB and more.
    of("-ot", "x=CPU")
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(60):
            of("-ot", f"(?:{'x' * 300}{number})=CPU")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()


def test_only_the_first_arguments_are_looked_at() -> None:
    fill = ["x"] * (ARGUMENTS_LIMIT - len(USUAL))
    assert of(*fill[1:], "--cpu-moe").counts
    verdict = of(*fill, "--cpu-moe")
    assert not verdict.counts
    assert f"after the first {ARGUMENTS_LIMIT} were not looked at" in verdict.reason


def test_reasons_are_one_printable_line() -> None:
    for verdict in (
        of("-ot", "\x1b[31m\nfloor 1020 MHz=CPU"),
        of("-ot", "exps=CPU\x1b[2J"),
        of("-ncmoe", "3\n<0>forged"),
        of("-ncmoe", "\u202e9\udcff" + "x" * 1_000_000),
        of(environ={"LLAMA_ARG_CPU_MOE": "\r\n1"}),
        of(exe="/tmp/\x1b]0;x\x07", match=MatchConfig(always=("*\x1b*",))),
    ):
        assert verdict.reason.isprintable()
        assert 0 < len(verdict.reason) <= 200


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
PATTERN = st.lists(
    st.sampled_from([*r"abx.*+?()[]{}|^$\\-_,;=:!<>0129", "exps", "blk", "CPU", "(?"]),
    max_size=30,
).map("".join)
ARGUMENT = st.one_of(
    ANY_TEXT,
    PATTERN,
    PATTERN.map(lambda pattern: f"{pattern}=CPU"),
    st.sampled_from(["-ot", "--override-tensor", "-otd", "-ncmoe", "-cmoe", "-p", "--n_cpu_moe"]),
    st.integers(-5, 10**12).map(str),
)
VARIABLES = st.sampled_from(
    [f"LLAMA_ARG_{name}" for name in ("OVERRIDE_TENSOR", "CPU_MOE", "N_CPU_MOE", "CPU_MOE_DRAFT")]
)
TEXTS = st.lists(ANY_TEXT, max_size=3).map(tuple)


@given(
    argv=st.lists(ARGUMENT, max_size=12),
    environ=st.dictionaries(VARIABLES | ANY_TEXT, ARGUMENT, max_size=4),
    exe=ANY_TEXT | st.sampled_from(["/usr/bin/llama-bench", SERVER + " (deleted)"]),
    match=st.builds(
        MatchConfig, flags=TEXTS, tensors=TEXTS, buffer_types=TEXTS, always=TEXTS, never=TEXTS
    )
    | st.just(DEFAULT),
)
@settings(deadline=None, max_examples=400)
def test_any_input_gets_a_verdict(
    argv: list[str], environ: dict[str, str], exe: str, match: MatchConfig
) -> None:
    verdict = judge(argv, environ, exe, match)
    assert verdict.reason.isprintable()
    assert 0 < len(verdict.reason) <= 200
