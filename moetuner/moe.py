"""Whether a process keeps Mixture-of-Experts weights on the CPU, judged from how it was started.

llama.cpp turns its flags and variables into one ordered list of (pattern, buffer type)
and places each tensor by the first pattern that is found in its name. The same list is
built here and applied to the names that expert tensors have; a process counts if one of
them lands in a buffer type that is the CPU's.

The process that infers is judged by its own command line. Router mode (--models-dir,
--models-preset) needs no rule of its own: the parent never infers, its children carry
the flags.

Not to be seen from here: what --fit or a config.ini placed on the CPU, and how many
layers the model really has. `match.always` is for the first, and for the second a
pattern counts if it would keep an expert of any layer that llama.cpp allows.

Command lines are written by others and read by root: their length, their patterns and
the time for one verdict are bounded, and whatever they hold, the answer is a Verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import PurePosixPath

from moetuner.config import MatchConfig
from moetuner.log import printable
from moetuner.placement import LAYERS, Override, Placement

EXPERTS = r"\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps"  # what --cpu-moe means
DENSE = r"\.ffn_(?:up|down|gate)\."  # what --n-cpu-ffn means

ARGUMENTS_LIMIT = 4096  # arguments looked at
PATTERNS_LIMIT = 32 * 1024  # characters of -ot values read in all
RUNS_LIMIT = 64  # different groups of -ot in one llama-bench
NAME_LIMIT = 64  # characters of a flag or a buffer type that can be a known one

NOTHING = "no flag keeps experts on the CPU; if --fit placed them there, add it to match.always"


@dataclass(frozen=True)
class Verdict:
    """Whether the process counts, and why: one printable phrase."""

    counts: bool
    reason: str


class _Kind(Enum):
    SWITCH = "all layers"
    COUNT = "layers below N"
    OVERRIDES = "pattern=buffer type, …"


@dataclass(frozen=True)
class _Option:
    kind: _Kind
    flags: tuple[str, ...]
    variables: tuple[str, ...] = ()
    pattern: str = EXPERTS
    draft: bool = False  # for the draft model, which has a list of its own


# In the order of llama.cpp's own table: that is the order in which variables are read,
# all of them before the command line. The names with _DRAFT at the end are of 2025.
_OPTIONS = (
    _Option(_Kind.OVERRIDES, ("-ot", "--override-tensor"), ("LLAMA_ARG_OVERRIDE_TENSOR",)),
    _Option(_Kind.SWITCH, ("-cmoe", "--cpu-moe"), ("LLAMA_ARG_CPU_MOE",)),
    _Option(_Kind.COUNT, ("-ncmoe", "--n-cpu-moe"), ("LLAMA_ARG_N_CPU_MOE",)),
    # Keeps no expert, but match.tensors may name what it does keep.
    _Option(_Kind.COUNT, ("-ncffn", "--n-cpu-ffn"), ("LLAMA_ARG_N_CPU_FFN",), DENSE),
    _Option(
        _Kind.OVERRIDES,
        ("-otd", "--override-tensor-draft", "--spec-draft-override-tensor"),
        draft=True,
    ),
    _Option(
        _Kind.SWITCH,
        ("-cmoed", "--cpu-moe-draft", "--spec-draft-cpu-moe"),
        ("LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "LLAMA_ARG_CPU_MOE_DRAFT"),
        draft=True,
    ),
    _Option(
        _Kind.COUNT,
        ("-ncmoed", "--n-cpu-moe-draft", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"),
        ("LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", "LLAMA_ARG_N_CPU_MOE_DRAFT"),
        draft=True,
    ),
)
_BY_FLAG = {flag: option for option in _OPTIONS for flag in option.flags}
# Options whose value is free text, so that it can be a flag's very name. Those that take
# a number, a path or a keyword are left out: their list is long and changes every month.
_TEXT_FLAGS = frozenset(
    (
        *("-p", "--prompt", "-sys", "--system-prompt", "-r", "--reverse-prompt"),
        *("-a", "--alias", "--tags", "--api-key", "-j", "--json-schema", "--grammar"),
        *("--chat-template", "--chat-template-kwargs", "--reasoning-budget-message"),
        *("--in-prefix", "--in-suffix", "--chunk-separator", "--dry-sequence-breaker"),
    )
)
_TRUE = frozenset(("1", "on", "true", "enabled"))
_FALSE = frozenset(("", "0", "off", "false", "disabled"))


@dataclass(frozen=True)
class _Setting:
    """One option as the process was given it; `said` is how, such as `--n-cpu-moe 30`."""

    option: _Option
    name: str
    value: str
    said: str


def judge(argv: Sequence[str], environ: Mapping[str, str], exe: str, match: MatchConfig) -> Verdict:
    """Whether a process started with `argv` and `environ` keeps experts on the CPU.

    `exe`: its resolved executable, perhaps with ` (deleted)`; empty if not known. In
    order: match.never, match.always, match.flags, llama.cpp's flags and variables.
    Raises nothing. The time is at most about BUDGET_S, plus the reading of argv.
    """
    path = exe.removesuffix(" (deleted)")
    for counts, key, executables in ((False, "never", match.never), (True, "always", match.always)):
        for executable in executables:
            if fnmatchcase(path if "/" in executable else PurePosixPath(path).name, executable):
                return _verdict(counts, f"match.{key}: {executable}")
    notes: list[str] = []
    if len(argv) > ARGUMENTS_LIMIT:
        notes.append(f"arguments after the first {ARGUMENTS_LIMIT} were not looked at")
    extra = frozenset(_normal(flag) for flag in match.flags)
    bench = _is_bench(argv, path)
    settings = [] if bench else list(_variables(environ, notes))
    for name, setting in _command_line(argv, extra, notes):
        if setting is None:
            return _verdict(True, f"match.flags: {name}")
        settings.append(setting)
    lists = _ordered(settings, bench, notes)
    placement = Placement(match.tensors, match.buffer_types)
    for overrides in lists:
        reason = placement.expert_on_cpu(overrides)
        if reason is not None:
            return _verdict(True, reason)
    notes += placement.notes
    given = list(dict.fromkeys(o.said for overrides in lists for o in overrides))
    # llama.cpp leaves --fit out when it was given any override.
    reason = "no expert is kept on the CPU by " + ", ".join(given[:4]) if given else NOTHING
    return _verdict(False, reason + (f" ({'; '.join(notes[:3])})" if notes else ""))


def _verdict(counts: bool, reason: str) -> Verdict:
    return Verdict(counts, printable(reason[:300]))


def _normal(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _is_bench(argv: Sequence[str], path: str) -> bool:
    """llama-bench and `llama bench`: a parser of its own, which reads no variables."""
    names = {PurePosixPath(name[-256:]).name for name in (path, *argv[:1])}
    return "llama-bench" in names or ("llama" in names and list(argv[1:2]) == ["bench"])


def _variables(environ: Mapping[str, str], notes: list[str]) -> Iterator[_Setting]:
    for option in _OPTIONS:
        for name in option.variables:
            value = environ.get(name, "")
            if option.kind is _Kind.SWITCH and value not in _TRUE:
                if value not in _FALSE:
                    notes.append(f"{name}={value[:20]} is not true")
            elif value:
                yield _Setting(option, name, value, f"{name}={value[:NAME_LIMIT]}")


def _command_line(
    argv: Sequence[str], extra: frozenset[str], notes: list[str]
) -> Iterator[tuple[str, _Setting | None]]:
    """The flags that matter, in order; None in place of a setting for one of `extra`.

    llama.cpp knows neither `--flag=value` nor `--`. The former is read all the same, for
    programs with another parser around the same library.
    """
    arguments = iter(islice(argv, 1, ARGUMENTS_LIMIT))
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        flag, equals, value = argument, "", ""
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
        if len(flag) > NAME_LIMIT:
            continue
        flag = _normal(flag)
        option = _BY_FLAG.get(flag)
        if flag in extra:
            yield flag, None
        elif option is None:
            if flag in _TEXT_FLAGS and not equals:
                next(arguments, None)
        elif option.kind is _Kind.SWITCH:
            if value.lower() not in _FALSE or not equals:
                yield flag, _Setting(option, flag, "", flag)
        else:
            if not equals:
                value = next(arguments, "")
            if value:
                yield flag, _Setting(option, flag, value, f"{flag} {value[:NAME_LIMIT]}")
            else:
                notes.append(f"{flag} has no value")


def _ordered(settings: Iterable[_Setting], bench: bool, notes: list[str]) -> list[list[Override]]:
    """The lists that place tensors: the main model's, the draft model's.

    llama-bench has no draft model, but a list for each group of -ot that it runs with.
    """
    main: list[Override] = []
    draft: list[Override] = []
    runs: list[list[Override]] = []
    room = PATTERNS_LIMIT
    for setting in settings:
        option = setting.option
        target = draft if option.draft else main
        if option.kind is _Kind.SWITCH:
            target.append(Override(option.pattern, "CPU", setting.said))
        elif option.kind is _Kind.COUNT:
            count = _count(setting.value, bench)
            if count is None:
                notes.append(f"{setting.said[:60]} is not a number of layers")
            elif count == 0:
                notes.append(f"{setting.said} keeps none")
            else:
                pattern = r"blk\.\*" + option.pattern
                target.append(Override(pattern, "CPU", setting.said, layers=min(count, LAYERS)))
        elif len(setting.value) > room:
            notes.append(f"{setting.name} is too long to be read")
        else:
            room -= len(setting.value)
            groups = setting.value.split(",") if bench else [setting.value]
            parsed = [_overrides(setting.name, g, ";" if bench else ",", notes) for g in groups]
            if bench:
                runs += parsed
            else:
                target += parsed[0]
    different = list(dict.fromkeys(map(tuple, runs)))[:RUNS_LIMIT] or [()]
    return [[*run, *main] for run in different] + [draft]


def _overrides(name: str, text: str, separator: str, notes: list[str]) -> list[Override]:
    found = []
    for part in text.split(separator):
        pattern, equals, buffer_type = part.partition("=")
        if equals and len(buffer_type) <= NAME_LIMIT:
            found.append(Override(pattern, buffer_type, name, own=True))
        elif part:
            notes.append(f"{name}: {part[:30]} is not pattern=buffer type")
    return found


def _count(value: str, bench: bool) -> int | None:
    """As C++'s stoi reads it: trailing text is ignored, a negative count is refused.

    llama-bench takes several, and ranges such as 0-40+10: the largest covers the others.
    """
    if bench:
        counts = re.findall(r"(?:^|,)(?:[0-9]+-)?0*([0-9]{1,9})(?![0-9])", value[:1024])
        return max(map(int, counts), default=None)
    number = re.match(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]{1,9})(?![0-9])", value)
    if number is None or (number[1] == "-" and int(number[2])):
        return None
    return int(number[2])
