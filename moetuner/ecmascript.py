"""The patterns of llama.cpp's --override-tensor, made safe to search with as root.

llama.cpp gives them to C++'s std::regex (ECMAScript grammar). They come from an
untrusted command line, and Python's `regex` package knows far more than that grammar
(recursion, fuzzy matching, named lists, code that unfolds counted repeats), so a
pattern is not handed on: it is read token by token, and what is known is written anew.
"""

from __future__ import annotations

import re

LENGTH_LIMIT = 4096  # characters; sixty layers listed one by one are 300
DEPTH_LIMIT = 30  # open parentheses
# Atoms after counted repeats are multiplied out. The regex package unfolds literal repeats
# when it compiles: (x{255}){255} a few times over took eleven seconds, then the memory.
# libstdc++ refuses patterns with more than 100,000 states.
SIZE_LIMIT = 5000

_TOKEN = re.compile(
    r"""
    (?P<open>   \( (?:\?[:=!])? )
  | (?P<close>  \) )
  | (?P<class>  \[ (?P<not>\^?) (?P<items>(?: \[:[a-z]+:\] | \\. | [^\]\\] )*) \] )
  | (?P<escape> \\ . )
  | (?P<count>  \{ (?P<low>\d{1,4}) (?: , (?P<high>\d{0,4}) )? \} \?? )
  | (?P<repeat> [*+?] \?? )
  | (?P<anchor> [\^$|] )
  | (?P<atom>   [^\\\[({] )
    """,
    re.VERBOSE,
)
_ITEM = re.compile(r"\[:[a-z]+:\]|\\?.")
_POSIX = frozenset(
    f"[:{name}:]" for name in ["alnum", "alpha", "digit", "lower", "print", "punct", "upper"]
)
# No token may match the line feed, which separates names in the text that is searched.
# The complements are spelled out over printable ASCII, of which tensor names consist.
_IN_CLASS = {
    "d": r"\d",
    "w": r"\w",
    "s": r"\t ",
    "D": r" -/:-~",
    "W": r" -/:-@\[-\^`\{-~",
    "S": r"!-~",
}
_ALONE = {letter: f"[{items}]" for letter, items in _IN_CLASS.items()} | {"b": r"\b", "B": r"\B"}
_UNUSUAL = "fnrtvcxu0123456789"  # control characters, code points, back references


def translate(pattern: str) -> str:
    """The same pattern for regex.compile(…, V0 | ASCII | MULTILINE), found within one line only.

    Searching a text of names, one a line, then finds what std::regex_search finds in the
    names one by one. Groups do not capture. Raises ValueError, saying why, for what
    std::regex refuses and for what no pattern for tensor names needs: back references,
    control characters and code points, non-ASCII text, sizes beyond the limits above.
    """
    if len(pattern) > LENGTH_LIMIT:
        raise ValueError(f"longer than {LENGTH_LIMIT} characters")
    if not (pattern.isascii() and pattern.isprintable()):
        raise ValueError("not printable ASCII")
    written: list[str] = []
    sizes = [0]  # atoms seen, one sum for each open group
    last = 0  # atoms of what a repeat would apply to; 0: there is nothing to repeat
    position = 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise ValueError(f"{pattern[position : position + 8]} is not understood")
        position = token.end()
        kind, text = token.lastgroup, token[0]
        if kind == "open":
            if len(sizes) > DEPTH_LIMIT:
                raise ValueError(f"more than {DEPTH_LIMIT} groups in groups")
            sizes.append(0)
            last = 0
            text = "(?:" if text == "(" else text
        elif kind == "close":
            if len(sizes) == 1:
                raise ValueError("unbalanced parenthesis")
            last = sizes.pop() + 1
            sizes[-1] += last
        elif kind in ("count", "repeat"):
            if not last:
                raise ValueError(f"{text} has nothing to repeat")
            sizes[-1] += last * max(int(token["low"] or 1) - 1, int(token["high"] or 1) - 1, 0)
            last = 0
        elif kind == "anchor":
            last = 0
        else:
            last = 1
            sizes[-1] += last
            if kind == "class":
                text = _class(token["items"], bool(token["not"]))
            elif kind == "escape":
                last = int(text[1] not in "bB")  # these are anchors too
                text = _escape(text[1], _ALONE)
            elif text != ".":
                text = re.escape(text)
        if sizes[-1] > SIZE_LIMIT:
            raise ValueError("its counted repeats are too large")
        written.append(text)
    if len(sizes) > 1:
        raise ValueError("unbalanced parenthesis")
    return "".join(written)


def _class(items: str, negated: bool) -> str:
    found = _ITEM.findall(items)
    if not found:  # ECMAScript: [] is nothing, [^] is anything
        return "." if negated else "(?:(?!))"
    written = []
    for index, item in enumerate(found):
        if item == "[" and found[index + 1 : index + 2] in ([":"], ["."], ["="]):
            raise ValueError(f"[{items[:8]} is not understood")
        if item == "-":
            # Literal at the end, and must not make a range with what is put behind it.
            written.append(r"\-" if index == len(found) - 1 else "-")
        elif item.startswith("[:"):
            if item not in _POSIX:
                raise ValueError(f"{item} is not understood")
            written.append(item)
        elif item.startswith("\\"):
            if item[1] in "bB":
                raise ValueError(f"{item} in brackets is not understood")
            written.append(_escape(item[1], _IN_CLASS))
        else:
            written.append(re.escape(item))
    return "[^" + "".join(written) + r"\n]" if negated else "[" + "".join(written) + "]"


def _escape(character: str, known: dict[str, str]) -> str:
    if character in _UNUSUAL:
        raise ValueError(f"\\{character} is not understood")
    # libstdc++ takes any other escaped letter for itself.
    return known.get(character) or re.escape(character)
