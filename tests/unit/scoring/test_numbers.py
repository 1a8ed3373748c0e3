"""Numbers as people write them are read exactly; what has two readings is none."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.scoring.own_results import score_math
from common.scoring.results.numbers import final_number, read_number, whole_number

READ = {
    "18": [
        "18", "18.", "18.00", "+18", "$18", "$18$", r"\$18", r"\(18\)", r"\boxed{18}", "**18**", "**18", "`18`", "_18_",
        "*18* apples", "18 apples", "18%", r"18\%", "18 %", "18°", r"18^\circ", r"18\text{ cm}", "18 cm^2", "18 cm²",
        "18 km/h", "18-inch", "18th", "18!", "18,", "18;", "18 ?", "(18)", '18"', "18 (3 more than 15)", "€18", "18 €",
        "USD 18", "= 18", "x = 18", "The final answer is: 18", "**Answer:** $18", "10 + 8 = 18", "$10 + $8 = $18",
        "18 per 3 hours", "18\n\nSo 20", "<<10+8=18>>18", "\uff11\uff18\uff0e", "\u0661\u0668", "1.8e1",
        "1.8 \u00d7 10^1", "36/2", '"18"', "'18'", "\u201c18\u201d", "\u201818\u2019", "\u201e18\u201c",
        "\u00ab18\u00bb", '"$18."',
        "<b>18</b>", "<strong>18</strong> apples", "18<br>", '<span class="x">18</span>.', "Therefore, 18", "thus 18",
        "so, 18",
    ],
    "-5": ["-5", "-$5", "$-5", "\u22125", "\u20135", "- 5", "minus 5", "negative 5", "**-5**", r"-\$5.00"],
    "1234.5": ["1,234.50", "$1,234.5", "1 234.5", "1\u2009234.5", "1\u202f234.5", r"1{,}234.5", r"1\,234.5", "1'234.5"],
    "1234567": ["1,234,567", "1 234 567", "12,34,567", "1_234_567"],
    "0.5": [".5", "0.5", "1/2", "½", r"\frac{1}{2}", r"\dfrac12", "$.50", "1/2 cup", "5e-1"],
    "2.5": ["2 1/2", "2½", r"2\frac{1}{2}"],
    "1000": ["1e3", "1E+3", "1 thousand", "1k", "1,000", "10 hundred"],
    "1.234": ["1.234", "+1.234 m"],
}  # fmt: skip
AMBIGUOUS = [
    "1,5", "1,23", "1.2.3", "1.234.567", "1,234,56", "1 2", "18-20", "18 \u2013 20", "18 to 20", "18 or 20", "18, 20",
    "18:30", "5²", "2^3", "2*3", "2**3", "2(3)", "10-8", "18x", "18π", r"18\pi", r"3+\sqrt2", "5K", "5 M", "1/0",
    '"18", "20"', "'18' '20'", "'18' or '20'", "**18**, **20**", "**18** or **20**", "<b>18</b> or 20", "<18", "< 18",
    "5'4\"", "18' 4\"", "<b>1</b>2",
    "12_5", "18 and a half", "18 squared", "18 hundredths", "--5", "±5", "not 18", "less than 18", "half of 18",
    "1 234/5", r"18\text{ or }20", "1e9999", "9" * 301, "", "eighteen", "$", ".", "-", "v2",
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), [(value, text) for value, texts in READ.items() for text in texts])
def test_a_number_is_read_however_it_is_written(value: str, text: str) -> None:
    assert read_number(text) == Fraction(value)
    assert score_math(f"so\n#### {text}", value)
    assert not score_math(f"so\n#### {text}", Fraction(value) + 1)


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_what_has_two_readings_is_no_number(text: str) -> None:
    assert read_number(text) is None
    assert final_number(f"#### 7\n#### {text}") in (None, 7)
    assert not any(score_math(f"#### {text}", value) for value in (1, 2, 3, 5, 12, 15, 18, 20, 23, 52))


def written(value: Fraction) -> list[str]:
    """Return ways to write a decimal number of at most two places."""
    sign, size = "-" if value < 0 else "", abs(value)
    plain, grouped = f"{float(size):.2f}", f"{float(size):,.2f}"
    texts = [
        plain,
        grouped,
        grouped.replace(",", "\u202f"),
        plain.removeprefix("0"),
        f"{size.numerator}/{size.denominator}",
    ]
    if size.denominator == 1:
        texts += [str(size), f"{size.numerator:,}", f"{size.numerator}.", f"{size.numerator:,}".replace(",", " ")]
    signed = [sign + text for text in texts]
    signed += [f"{sign}${text}" for text in texts] + [f"${sign}{text}" for text in texts]
    return [*signed, *(text.replace("-", "\u2212") for text in signed)]


WRAPPINGS = [
    "{}",
    "**{}**",
    "`{}`",
    r"\boxed{{{}}}",
    "{} apples",
    "{}%",
    "{}.",
    "({})",
    "The answer is {}",
    "= {}",
    "{}\n",
]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**7), 10**7), st.sampled_from([1, 1, 2, 4, 100]), st.integers(-(10**7), 10**7), st.data())
def test_right_numbers_are_right_and_others_wrong(top: int, bottom: int, other: int, data: Any) -> None:
    value = Fraction(top, bottom)
    text = data.draw(st.sampled_from(WRAPPINGS)).format(data.draw(st.sampled_from(written(value))))
    assert final_number(f"thus 3\n#### {text}\nand 4") == value, text
    assert score_math(f"#### {text}", other) is (value == other)


JOINED = [
    "-",
    " - ",
    "\u2013",
    " to ",
    " or ",
    " and ",
    ", ",
    "; ",
    " ",
    ":",
    "^",
    "*",
    "**",
    " x ",
    " \u00d7 ",
    "+",
    ".",
]


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 10**6), st.integers(1001, 10**6), st.sampled_from([*JOINED, "/"]))
def test_of_two_numbers_neither_is_the_result(one: int, other: int, between: str) -> None:
    assert not score_math(f"#### {one}{between}{other}", one)
    assert not score_math(f"#### {one}{between}{other}", other)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.,/-+$%*_ eEkx\\{}()=\u2212\u2009½²№१\n#", max_size=40))
def test_any_text_is_read_or_not(text: str) -> None:
    for number in (read_number(text), whole_number(text), final_number(f"####{text}")):
        assert number is None or isinstance(number, Fraction)


def test_the_last_mark_with_a_number_counts_else_the_last_box() -> None:
    assert final_number("#### Step 1: add\n#### 18\n#### Remarks\nNone") == 18
    assert final_number("#### 18\n#### 1,5") is None
    assert final_number(r"\boxed{3} and \boxed{-\frac{3}{4}}") == Fraction(-3, 4)
    assert final_number(r"\boxed{3} #### 4") == 4
    assert final_number("18") is None


def test_a_whole_number_has_nothing_beside_it() -> None:
    assert whole_number("-1/2") == Fraction(-1, 2) and whole_number("50%") == 50
    assert [whole_number(text) for text in ("5 apples", "3-2", "x", "(5)", "")] == [None] * 5


@pytest.mark.parametrize(
    "text", ["#### " * 20_000, "####" + "*" * 50_000, "####" + "1," * 30_000, "####" + "9 " * 30_000]
)
def test_long_texts_end_nothing(text: str) -> None:
    assert final_number(text) is None
