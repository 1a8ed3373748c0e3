"""Regular expressions as users write them, in the terms of the library that compiles them: ASCII's classes in the place
of Unicode's, and in a JSON string nothing that the string would have to escape."""

from __future__ import annotations

import re

from common.errors import ConfigError

_MOST_LETTERS = 20_000
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\{(?:\d+(?:,\d*)?|,\d*)\}|.", re.DOTALL)
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_SYNTAX = {"*", "+", "?", "(", "(?:", ")", "|"}
_ANGLES = (r"\<", r"\>")  # where a word begins and ends, to the library
_ESCAPED = ['"', "\\", *map(chr, range(32)), *map(chr, range(0x7F, 0xA0))]  # of these, what JSON or its texts escape
_SET_SYNTAX = re.compile(r"\[|&&|--|~~")  # of the library's sets, and letters to Python
_LOOKS = "what looks ahead or back is not compiled: write out what the text is"
_NOT_COMPILED = {  # outside of sets; each with the way out
    re.compile(r"\(\?<?[=!]"): _LOOKS,
    # Python keeps white space in sets there, the library does not.
    re.compile(r"\(\?[a-z]*x"): "the flag x is not compiled: write the expression without white space and comments",
    re.compile(r"\(\?#"): "a comment is not compiled: leave it out",
    re.compile(r"\(\?>"): "(?> is not compiled: write (?:, without what keeps texts from matching",
    re.compile(r"\(\?(?:P=|\()"): "what refers to another group is not compiled: write out what the text is",
}
_NO_ESCAPES = re.compile(r"\\[0-9N]")  # a group, a letter by its number or by its name
_ENDS = {r"\A": "^", r"\Z": "$"}
LETTERS = r'[^"\\\x00-\x1F\x7F-\x9F]'  # of a JSON string, as they are


def in_ascii(regex: str) -> str:
    r"""Return the expression with ASCII's \d, \w and \s, and without ^ and $ at its ends, where they say nothing.
    Raises ConfigError where it is none, and for what the library reads otherwise or not at all."""
    atoms = _atoms(regex)
    begins, ends = atoms[:1] == ["^"], atoms[-1:] == ["$"]
    return "".join(map(_in_ascii, _without_ends(atoms, begins, ends)))


def require_short(regex: str, name: str = "it") -> None:
    """Raise ConfigError for an expression of more letters than are compiled. name: in the sentence."""
    if len(regex) > _MOST_LETTERS:
        raise ConfigError(f"{name} has {len(regex)} letters, at most {_MOST_LETTERS} are compiled: shorten it")


def _atoms(regex: str) -> list[str]:
    require_short(regex)
    try:
        re.compile(regex)  # of two halves of a group, one might close what stands around them
    except RecursionError:
        raise ConfigError("its groups are nested too deeply to be read: write fewer in each other") from None
    except (re.error, OverflowError) as error:
        raise ConfigError(f"it is no regular expression ({error})") from None
    atoms = _ATOM.findall(regex)
    for before, atom in zip(("", *atoms), atoms, strict=False):
        if atom == "+" and (before in ("*", "+", "?") or _is_count(before)):
            raise ConfigError(f"{before:.60}+ is not compiled: leave the + out, which keeps texts from matching")
        inner = atom[2:-1] if atom.startswith("[^") else atom[1:-1]
        if atom[0] == "[" and _SET_SYNTAX.search(re.sub(r"\\.", " ", inner, flags=re.DOTALL)):
            raise ConfigError(
                f"{atom:.60} is read in several ways: write \\ in front of [, &, - and ~ that are letters"
            )
        if atom in (r"\b", r"\B"):
            raise ConfigError(_LOOKS)
        if _NO_ESCAPES.match(atom):
            raise ConfigError(rf"{atom} is not compiled: write the letters themselves, or their numbers as \x and \u")
    outside = "".join(atom for atom in atoms if atom[0] not in "\\[")
    for syntax, reason in _NOT_COMPILED.items():
        if syntax.search(outside):
            raise ConfigError(reason)
    return [_ENDS.get(atom, atom) for atom in atoms]


def _without_ends(atoms: list[str], begins: bool, ends: bool) -> list[str]:
    """Leave ^ and $ at the ends away. Raises ConfigError for others, and where they are of one way among several."""
    inner, depth = atoms[begins : len(atoms) - ends], 0
    for atom in inner:
        depth += (atom in ("(", "(?:")) - (atom == ")")
        if atom in ("^", "$") or (atom == "|" and not depth and (begins or ends)):
            raise ConfigError("write ^ and $ at its ends only, and what stands between them in one group")
    return inner


def in_json_string(pattern: str) -> str:
    """Return the expression of JSON strings, without their quotes, in which the pattern is found. Raises ConfigError
    for one that is none, and for one that the string's own syntax might break."""
    atoms = _atoms(pattern)
    begins, ends = atoms[:1] == ["^"], atoms[-1:] == ["$"]
    inner = _without_ends(atoms, begins, ends)
    for atom in inner:
        if atom not in _SYNTAX and not _is_count(atom):
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
        return re.sub(r"\\(.)", _in_set, atom, flags=re.DOTALL)
    if _is_count(atom):
        return atom.replace("{,", "{0,")
    if atom in ("{", "}"):
        return f"\\{atom}"
    if atom in _ANGLES:
        return atom[1]
    if atom[0] == "\\" and atom[1:] in _SETS:
        return f"[{_SETS[atom[1:]]}]"
    if atom[0] == "\\" and atom[1:].lower() in _SETS:
        return f"[^{_SETS[atom[1:].lower()]}]"
    return atom


def _is_count(atom: str) -> bool:
    return len(atom) > 1 and atom[0] == "{"


def _in_set(found: re.Match[str]) -> str:
    name = found[1]
    if found[0] in _ANGLES:
        return name
    return f"[^{_SETS[name.lower()]}]" if name in "DWS" else _SETS.get(name, found[0])
