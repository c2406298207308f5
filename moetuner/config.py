"""The configuration file: parse → validate → one frozen object.

`KEYS` is the only list of keys. Each error names file, line and key and says what
the key takes; an unknown key is an error, with the nearest known one suggested.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moetuner.errors import ConfigError, reason

DEFAULT_PATH = Path("/etc/moetuner/moetuner.yaml")
SIZE_LIMIT = 1024 * 1024  # bytes; a configuration is a page of text
MHZ = 1_000_000


@dataclass(frozen=True)
class FloorConfig:
    """How the GPU's floor is set."""

    frequency_hz: int | None = None  # None: the highest that max_freq allows
    hold_s: float = 1.0
    node: str | None = None  # None: found by name; else a name under /sys/class/devfreq
    yield_to_throttling: bool = True


@dataclass(frozen=True)
class WatchConfig:
    """Where llama.cpp is looked for."""

    libraries: tuple[str, ...] = ()
    rescan_s: float = 300.0
    returns: str = "auto"  # auto | sites | uretprobe


@dataclass(frozen=True)
class MatchConfig:
    """Who counts as a process that keeps experts on the CPU."""

    flags: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    buffer_types: tuple[str, ...] = ("CPU", "MOETUNER")
    always: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    floor: FloorConfig = field(default_factory=FloorConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    match: MatchConfig = field(default_factory=MatchConfig)
    source: str = "built-in defaults"


def _number(low: float, high: float, unit: str) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not low <= value <= high:
            raise ValueError
        return float(value)

    convert.__doc__ = f"a number of {unit} from {low:g} to {high:g}"
    return convert


_FREQUENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(GHz|MHz|kHz|Hz)?", re.IGNORECASE)
_HZ = {"ghz": 1_000_000_000, "mhz": MHZ, "khz": 1000, "hz": 1, "": 1}


def _frequency(value: Any) -> int | None:
    """`max`, or a frequency with its unit such as `918 MHz` (1 MHz to 10 GHz)"""
    if value == "max":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError
    match = _FREQUENCY.fullmatch(str(value).strip())
    if not match:
        raise ValueError
    hz = round(float(match[1]) * _HZ[(match[2] or "").lower()])
    # A bare `1020` is meant as MHz by whoever writes it, and would be 1 kHz to the kernel.
    if not MHZ <= hz <= 10_000 * MHZ:
        raise ValueError
    return hz


def _boolean(value: Any) -> bool:
    """true or false"""
    if not isinstance(value, bool):
        raise ValueError
    return value


def _node(value: Any) -> str | None:
    """`auto`, or the name of a device below /sys/class/devfreq such as `17000000.gpu`"""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:@-]+", value) or value in (".", ".."):
        raise ValueError
    return None if value == "auto" else value


def _choice(*names: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    convert.__doc__ = "one of " + ", ".join(names)
    return convert


def _strings(value: Any) -> tuple[str, ...]:
    """a list of texts, for example [one, two]"""
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError
    return tuple(value)


def _paths(value: Any) -> tuple[str, ...]:
    """a list of absolute paths (`*` and `?` allowed)"""
    if not all(item.startswith("/") for item in _strings(value)):
        raise ValueError
    return tuple(value)


def _flags(value: Any) -> tuple[str, ...]:
    """a list of command-line flags that begin with a dash"""
    if not all(item.startswith("-") for item in _strings(value)):
        raise ValueError
    return tuple(value)


def _tensors(value: Any) -> tuple[str, ...]:
    """a list of tensor names, `*` for the layer number: [blk.*.my_experts.weight]"""
    if not all(re.fullmatch(r"[\w.*-]{1,64}", item) for item in _strings(value)):
        raise ValueError
    return tuple(value)


@dataclass(frozen=True)
class Key:
    """One key of the file: where it lands and what it takes (`convert.__doc__` says it)."""

    section: str
    name: str
    attribute: str
    convert: Callable[[Any], Any]


KEYS: tuple[Key, ...] = (
    Key("floor", "frequency", "frequency_hz", _frequency),
    # Below 0.1 s the floor would flap between the tokens of a slow model; above a
    # minute it is no longer "only while it runs".
    Key("floor", "hold", "hold_s", _number(0.1, 60, "seconds")),
    Key("floor", "node", "node", _node),
    Key("floor", "yield_to_throttling", "yield_to_throttling", _boolean),
    Key("watch", "libraries", "libraries", _paths),
    Key("watch", "rescan", "rescan_s", _number(10, 86400, "seconds")),
    Key("watch", "returns", "returns", _choice("auto", "sites", "uretprobe")),
    Key("match", "flags", "flags", _flags),
    Key("match", "tensors", "tensors", _tensors),
    Key("match", "buffer_types", "buffer_types", _strings),
    Key("match", "always", "always", _strings),
    Key("match", "never", "never", _strings),
)
SECTIONS: dict[str, type[FloorConfig] | type[WatchConfig] | type[MatchConfig]] = {
    "floor": FloorConfig,
    "watch": WatchConfig,
    "match": MatchConfig,
}


def load(path: Path, *, optional: bool = False) -> Config:
    """The configuration in `path`; the defaults if it is missing and `optional`.

    Raises ConfigError (`FILE:LINE: key: …`), which changes nothing.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        if optional:
            return Config()
        raise ConfigError(f"{path}: no such file", "give --config FILE") from None
    except OSError as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    if len(data) > SIZE_LIMIT:
        raise ConfigError(f"{path}: larger than {SIZE_LIMIT} bytes: not a configuration file")
    return parse(data, str(path))


def parse(text: bytes | str, source: str) -> Config:
    """As load, from text; `source` stands in front of the line number in errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{source}:1: not valid YAML: {summary}") from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.value in ("", "null", "~")):
        return Config(source=source)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for section, node, section_line in _pairs(root, source, "the file"):
        if section not in SECTIONS:
            raise _unknown(source, section_line, section, list(SECTIONS))
        if isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~"):
            continue  # `floor:` with every key below it commented out
        known = {key.name: key for key in KEYS if key.section == section}
        for name, value_node, line in _pairs(node, source, section):
            if name not in known:
                raise _unknown(source, line, f"{section}.{name}", list(known))
            key = known[name]
            try:
                values[section][key.attribute] = key.convert(_construct(value_node))
            except (ValueError, yaml.YAMLError, RecursionError):
                raise ConfigError(
                    f"{source}:{line}: {section}.{name}: {_shown(value_node)} is not "
                    f"{key.convert.__doc__}"
                ) from None
    return Config(
        floor=FloorConfig(**values["floor"]),
        watch=WatchConfig(**values["watch"]),
        match=MatchConfig(**values["match"]),
        source=source,
    )


def _pairs(node: yaml.Node, source: str, what: str) -> Iterator[tuple[str, yaml.Node, int]]:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:{line}: {what} takes `key: value` lines, not {_shown(node)}")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: {_shown(key)} is not a key")
        if key.value in seen:
            raise ConfigError(
                f"{source}:{line}: {key.value} is given twice (first on line {seen[key.value]})"
            )
        seen[key.value] = line
        yield key.value, value, line


def _construct(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:60])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _unknown(source: str, line: int, name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(known)
    return ConfigError(f"{source}:{line}: unknown key {name}", hint)
