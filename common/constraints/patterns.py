"""Regular expressions as users write them, in the terms of the library that compiles them: ASCII's classes in the place
of Unicode's, and in a JSON string nothing that the string would have to escape."""

from __future__ import annotations

import re

from common.errors import ConfigError

_MOST_LETTERS = 20_000
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_SYNTAX = {"*", "+", "?", "{", "}", "(", "(?:", ")", "|"}
_ESCAPED = ['"', "\\", *map(chr, range(32)), *map(chr, range(0x7F, 0xA0))]  # of these, what JSON or its texts escape
LETTERS = r'[^"\\\x00-\x1F\x7F-\x9F]'  # of a JSON string, as they are


def in_ascii(regex: str) -> str:
    r"""Return the expression with ASCII's \d, \w and \s. Raises ConfigError where it is none."""
    if len(regex) > _MOST_LETTERS:
        raise ConfigError(f"it has {len(regex)} letters, at most {_MOST_LETTERS} are compiled")
    try:
        re.compile(regex)  # of two halves of a group, one might close what stands around them
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"it is no regular expression ({error})") from None
    return "".join(map(_in_ascii, _ATOM.findall(regex)))


def in_json_string(pattern: str) -> str:
    """Return the expression of JSON strings, without their quotes, in which the pattern is found. Raises ConfigError
    for one that is none, and for one that the string's own syntax might break."""
    in_ascii(pattern)
    atoms = _ATOM.findall(pattern)
    begins, ends = atoms[:1] == ["^"], atoms[-1:] == ["$"]
    inner = atoms[begins : len(atoms) - ends]
    depth = 0
    for atom in inner:
        depth += (atom in ("(", "(?:")) - (atom == ")")
        if atom in ("^", "$") or (atom == "|" and not depth and (begins or ends)):
            raise ConfigError("write ^ and $ at its ends only, and what stands between them in one group")
        if atom not in _SYNTAX:
            _require_plain(atom)
    body = f"(?:{''.join(map(_in_ascii, inner))})"
    return f"{'' if begins else LETTERS + '*'}{body}{'' if ends else LETTERS + '*'}"


def _require_plain(atom: str) -> None:
    if atom[0] == "\\" and atom[1].isalnum() and atom[1] not in _SETS:
        raise ConfigError(rf"{atom} is not compiled: write \d, \w or the letters that you want")
    if any(re.fullmatch(atom, letter, re.DOTALL) for letter in _ESCAPED):
        raise ConfigError(f"{atom} takes letters that a JSON string escapes: list those that you want")


def _in_ascii(atom: str) -> str:
    if atom[0] == "[":
        return re.sub(r"\\(.)", lambda found: _SETS.get(found[1], found[0]), atom, flags=re.DOTALL)
    if atom[0] == "\\" and atom[1:] in _SETS:
        return f"[{_SETS[atom[1:]]}]"
    if atom[0] == "\\" and atom[1:].lower() in _SETS:
        return f"[^{_SETS[atom[1:].lower()]}]"
    return atom
