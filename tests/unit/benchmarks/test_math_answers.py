"""GSM8K and MATH: which part of an answer is its result, and which results are the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.benchmarks import BENCHMARKS
from common.benchmarks import math as math_benchmark
from common.benchmarks.latex import boxed, normalized

# Of openai/grade-school-math (MIT).
GSM8K = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does it "
    "take?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total amount of fabric is 2+1=<<2+1=3>>3 bolts of "
    "fabric\n#### 3",
}


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" 1 + 2 = 3\n#### 3", True, True),
        ("#### 3.", True, True),
        ("#### 3\n#### 4", True, False),
        ("So it takes 3 bolts.", False, True),
        ("#### $3", False, True),  # lm-eval's strict pattern takes no dollar sign
        ("#### 4", False, False),
        ("#### 4\nor rather 3", False, True),
        ("3 then 30", False, False),
        ("", False, False),
        ("...", False, False),
    ],
)
def test_gsm8k_has_a_strict_and_a_flexible_rule(text: str, strict: bool, flexible: bool) -> None:
    assert BENCHMARKS["gsm8k"].mark(GSM8K, text) == {"strict-match": strict, "flexible-extract": flexible}


def test_gsm8k_numbers_may_be_grouped() -> None:
    row = {"question": "?", "answer": "so\n#### 1,200"}
    assert all(BENCHMARKS["gsm8k"].mark(row, "#### 1200").values())
    assert all(BENCHMARKS["gsm8k"].mark(row, "#### 1,200").values())


def test_a_gsm8k_row_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match="#### N"):
        BENCHMARKS["gsm8k"].mark({"question": "?", "answer": "3"}, "3")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$\boxed 7$.", "7"),
        (r"\fbox{x}", "x"),
        (r"\boxed{never closed", None),
        ("nothing", None),
    ],
)
def test_the_last_box_counts(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"x = \frac12", r"\frac{1}{2}"),
        ("$18$ dollars", "18"),
        (r"90^\circ", "90"),
        ("1,000", "1000"),
        (r"\text{east}", "east"),
        (r"2\sqrt3", r"2\sqrt{3}"),
        (r"\left(3, 4\right)", r"\left(3,4\right)"),
        (r"30\ \text{m}", "30"),
        (r"12\%", r"12 \%"),
        ("3 km", "3"),
    ],
)
def test_results_of_one_value_are_written_alike(one: str, other: str) -> None:
    assert normalized(one) == normalized(other)


@pytest.mark.parametrize(("one", "other"), [("0,1", "01"), ("(2,5)", "(2,5]"), ("-1", "1"), (r"\frac12", r"\frac13")])
def test_results_of_other_values_are_not(one: str, other: str) -> None:
    assert normalized(one) != normalized(other)


ROW = {"problem": "What is half of one?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "type": "Prealgebra"}
SENTENCE = "Final Answer: The final answer is ${}$. I hope it is correct."


@pytest.mark.parametrize(
    ("text", "final", "minerva"),
    [
        (SENTENCE.format(r"\frac12"), True, True),
        (SENTENCE.format("2"), False, False),
        (r"\boxed{\frac{1}{2}}", True, False),
        (r"\boxed{\frac{1}{2}}" + "\n" + SENTENCE.format("2"), False, False),
        ("a half", False, False),
        (r"\boxed{}", False, False),
    ],
)
def test_math_takes_the_sentence_else_the_box(
    text: str, final: bool, minerva: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_benchmark, "can_compare", lambda: False)
    assert BENCHMARKS["math"].mark(ROW, text) == {"final-answer": final, "minerva": minerva}


def test_math_is_told_apart_by_subject() -> None:
    assert BENCHMARKS["math"].kind(ROW) == "Prealgebra"
    assert BENCHMARKS["math"].kind({**ROW, "type": 3}) == ""


def test_a_math_row_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match="boxed"):
        BENCHMARKS["math"].mark({"problem": "?", "solution": "3"}, "3")


@pytest.mark.slow  # sympy takes a second to load, twice
def test_equal_values_count_where_sympy_is_installed() -> None:
    if not math_benchmark.can_compare():
        pytest.skip("sympy's LaTeX parser is not installed: pip install 'lopa[eval]'")
    assert BENCHMARKS["math"].mark(ROW, r"\boxed{0.5}")["final-answer"]
    assert not BENCHMARKS["math"].mark(ROW, r"\boxed{0.25}")["final-answer"]
    assert not BENCHMARKS["math"].mark(ROW, r"\boxed{9^{9^{9^{9}}}}")["final-answer"]


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("\\boxed{}$fracsqrt[]#, 0123.-=ä\n"), max_size=60))
def test_any_text_is_marked(text: str) -> None:
    assert set(BENCHMARKS["gsm8k"].mark(GSM8K, text)) == {"strict-match", "flexible-extract"}
    normalized(text)
    boxed(text)
