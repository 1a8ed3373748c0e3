"""Numbers as people write them, exactly: what can be read in two ways is no number (docs/evaluation.md lists both)."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_MOST_LOOKED_AT = 400  # characters after a mark
_MOST_MARKS = 50  # from the last one on
_LETTERS: dict[int, int | str] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full width
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), ""),
    **dict.fromkeys(map(ord, "\u2019\u02bc"), "'"),
    **dict.fromkeys(map(ord, "\u00d7\u00b7\u22c5"), "*"),
    **dict.fromkeys(map(ord, "\u00f7\u2044"), "/"),
}
_REWRITTEN = (
    (re.compile(r"<<[^<>\n]*>>"), ""),  # GSM8K's calculations
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|~(?=\d)"), " "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac(?![A-Za-z]))"), " "),
    (re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))"), r"\1\2/\3\4"),
)
_CURRENCY = r"(?:(?:US|A|C)?\$|[€£¥₹¢]|(?:USD|EUR|GBP|INR|Rs\.?)(?![A-Za-z]))"
_WORDS = (
    r"(?:the|so|therefore|thus|hence|final|correct|answer|result|total|is|are|it|equals?|about|approximately|exactly"
    r"|only|[a-z]\s*(?==))"
)
_TAG = r"</?(?:b|strong|i|em|u|mark|code|span|p|div|br)\b[^<>\n]{0,100}>"
_QUOTE = "\"'\u201c\u201d\u201e\u201f\u2018\u201a\u00ab\u00bb"
_BEFORE = (
    rf"(?:[\s*_`:=≈~#(\[{{|{_QUOTE}]|{_TAG}|\\[()\[\]]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)(?![A-Za-z])|{_CURRENCY}"
    rf"|\b{_WORDS}(?![A-Za-z]),?)*"
)
_COUNT = r"(?:\d{1,3}([,' _])\d{3}(?:\1\d{3})*|\d{1,3}(?:,\d{2})+,\d{3}|\d{1,300})(?!\d)(?:\.\d{0,300})?|\.\d{1,300}"
_BEGIN = re.compile(rf"{_BEFORE}(?P<sign>[-+]|\b(?:minus|negative)\b)?{_BEFORE}(?=\.?\d)", re.IGNORECASE)
_MIXED = re.compile(r"(\d{1,300}) +(\d{1,300}) */ *(\d{1,300})(?![\d.,])")
_PLAIN = re.compile(_COUNT)
_OVER = re.compile(r"\s*/\s*(?=\.?\d)")
_POWER = re.compile(r"[eE]([-+]?\d{1,3})(?!\d)|\s*(?:[x*]|\\times|\\cdot)\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})(?!\d)\}?")
_SCALE = re.compile(r"\s*-?\b(hundred|thousand|million|billion|trillion)\b|(k)\b")
_SCALES = {"hundred": 2, "thousand": 3, "k": 3, "million": 6, "billion": 9, "trillion": 12}
_CLOSED = re.compile(
    rf"[*_`]+(?!\s*[\d\\(])|\s*%|\s*\\[)\]]|[)\]}}$|{_QUOTE}]|\s*{_TAG}|\^\s*\{{?\s*\\circ\s*\}}?|\s*°"
)
_OPERATES = re.compile(r"\s*(?:[-+*/^:x]|\*\*)\s*[($\\{]*\s*\.?\d")
# What makes another number of what stands in front of it, or a second one of it.
_GOES_ON = re.compile(
    "|".join(
        (
            _OPERATES.pattern,
            rf"\(\s*\d+\s*\)|[.,'_]?\d|[eE]\d|\s+[{_QUOTE}]?\d|\s*[,;]\s*[-+$\\*_`{_QUOTE}]*\d",
            r"\s*[-+*/]\s*\\|\s*[_^]|\s*[π√∞±²³¹⁰⁴-⁹]",
            r"\s*\\(?!(?:text|mathrm|mbox|quad|circ|degree|right)(?![A-Za-z])|[()\[\] ])",
            r"\s?[xyzniKMB](?![A-Za-z])|\s*(?:bn|mn|mln)\b",
            r"\s*-?(?:half|halves|(?:thir|four|fif|six|eigh|ten|hundred|thousand)(?:d|th)s?|squared|cubed)\b(?!-)",
            r"\s*(?:\\text\{\s*)?(?:and|or|to|plus|minus|times|over|by|point)\s+\}?\s*"
            r"(?:(?:an?|one|two|three)\s+)?"
            rf"(?:half|thirds?|quarters?|[-$*_`{_QUOTE}]*\d)",
        )
    )
)
_MARK = re.compile("####|" + r"\\boxed(?![A-Za-z])")


def read_number(text: str) -> Fraction | None:
    """Return the number that a text begins with, but for markup, currency and "the answer is"; a unit may follow."""
    return _read(plain(text[:_MOST_LOOKED_AT]))[1]


def whole_number(text: str) -> Fraction | None:
    """Return the number that a text is, with nothing but its sign, currency, percent or degree sign and a full stop."""
    if not re.fullmatch(r"\s*[-+]?\s*[-+$€£¥₹\d\s.,'_/%°eE]+", text := plain(text)):
        return None
    return _read(text)[1]


def final_number(text: str) -> Fraction | None:
    """Return the number after the last `####` that one follows; of a text without `####`, in the last \\boxed{}.

    None too where what follows the last of them can be read in two ways.
    """
    places = [match.span() for match in _MARK.finditer(text)]
    hashes = [span for span in places if text[span[0]] == "#"]
    for _, end in (hashes or places)[: -_MOST_MARKS - 1 : -1]:
        is_number, value = _read(plain(text[end : end + _MOST_LOOKED_AT].split("####", 1)[0]))
        if is_number:
            return value
    return None


def marked_number(answer: str) -> Fraction:
    """Return the number after the last `####` of a right answer. Raises ValueError without one."""
    number = final_number(answer) if "####" in answer else None
    if number is None:
        raise ValueError("its `answer` has no '#### N', the number that answers are compared with")
    return number


def plain(text: str) -> str:
    """Write digits of all scripts, minus signs, spaces, fractions and LaTeX's separators in ASCII."""
    text = "".join(map(_ascii, text.translate(_LETTERS)))
    for pattern, written in _REWRITTEN:
        text = pattern.sub(written, text)
    return text


def _ascii(letter: str) -> str:
    if letter < "\x80":
        return letter
    if (digit := unicodedata.decimal(letter, None)) is not None:
        return str(digit)
    if unicodedata.decomposition(letter).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", letter).replace("\u2044", "/")
    return letter


def _read(text: str) -> tuple[bool, Fraction | None]:
    """Whether a text begins with something like a number, and its value if there is one only."""
    begin = _BEGIN.match(text)
    if begin is None:
        return False, None
    line = text[: begin.end()] + text[begin.end() :].split("\n", 1)[0]
    found = _value(line, begin.end())
    if found is None:
        return True, None
    value, end = found
    while (closed := _CLOSED.match(line, end)) is not None:
        end = closed.end()
    if _OPERATES.match(line, end) and "=" in line[end:]:
        return True, _read(line.rsplit("=", 1)[1])[1]
    if _GOES_ON.match(line, end):
        return True, None
    return True, value if begin["sign"] in (None, "+") else -value


def _value(line: str, start: int) -> tuple[Fraction, int] | None:
    """Return what the digits from `start` on say, and where they end."""
    if (mixed := _MIXED.match(line, start)) is not None:
        whole, numerator, denominator = map(int, mixed.groups())
        return (whole + Fraction(numerator, denominator), mixed.end()) if numerator < denominator else None
    first = _PLAIN.match(line, start)
    if first is None:
        return None
    value, end = _exact(first[0]), first.end()
    if (over := _OVER.match(line, end)) is not None:
        below = _PLAIN.match(line, over.end())
        divisor = _exact(below[0]) if below is not None else 0
        return (value / divisor, below.end()) if below is not None and divisor else None
    if (power := _POWER.match(line, end)) is not None:
        value, end = value * Fraction(10) ** int(power[1] or power[2]), power.end()
    while (scale := _SCALE.match(line, end)) is not None:
        value, end = value * 10 ** _SCALES[scale[1] or scale[2]], scale.end()
    return value, end


def _exact(count: str) -> Fraction:
    return Fraction("0" + re.sub(r"[,' _]", "", count).rstrip("."))
