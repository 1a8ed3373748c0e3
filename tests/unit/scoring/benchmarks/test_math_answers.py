"""GSM8K and MATH: which part of an answer is its result, and which results are the same."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.scoring.benchmarks.task import BENCHMARKS
from common.scoring.results import symbolic
from common.scoring.results.expressions import is_same_result
from common.scoring.results.latex import boxed, normalized

# A row of openai/grade-school-math (MIT).
GSM8K = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does it "
    "take?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total amount of fabric is 2+1=<<2+1=3>>3 bolts of "
    "fabric\n#### 3",
}


@pytest.mark.parametrize(
    ("text", "number", "strict", "flexible"),
    [
        (" 1 + 2 = 3\n#### 3", True, True, True),
        ("#### 3.", True, True, True),
        ("#### 3\n#### 4", False, True, False),
        ("So it takes 3 bolts.", False, False, True),
        ("#### $3", True, False, True),  # lm-eval's strict pattern takes no dollar sign
        ("#### **3.00** bolts", True, False, False),
        (r"\boxed{3}", True, False, True),
        ("#### 3-4", False, True, False),
        ("#### 4", False, False, False),
        ("#### 4\nor rather 3", False, False, True),
        ("3 then 30", False, False, False),
        ("", False, False, False),
        ("...", False, False, False),
    ],
)
def test_gsm8k_has_a_rule_of_its_own_and_lm_evals_two(text: str, number: bool, strict: bool, flexible: bool) -> None:
    found = BENCHMARKS["gsm8k"].mark(GSM8K, text)
    assert found == {"number": number, "strict-match": strict, "flexible-extract": flexible}
    assert next(iter(found)) == "number"  # which decides


@pytest.mark.parametrize(
    ("result", "text"), [("-5", "#### -$5"), ("-$5", "#### \u22125"), ("0.5", "#### .5"), ("18", "#### **18**")]
)
def test_gsm8k_takes_numbers_as_people_write_them(result: str, text: str) -> None:
    assert BENCHMARKS["gsm8k"].mark({"question": "?", "answer": f"so\n#### {result}"}, text)["number"]


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
def test_math_takes_the_sentence_else_the_box(text: str, final: bool, minerva: bool) -> None:
    assert BENCHMARKS["math_plain"].mark(ROW, text) == {"final-answer": final, "minerva": minerva}


def test_math_is_told_apart_by_subject() -> None:
    assert BENCHMARKS["math"].kind(ROW) == "Prealgebra"
    assert BENCHMARKS["math"].kind({**ROW, "type": 3}) == ""


def test_a_math_row_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match="boxed"):
        BENCHMARKS["math"].mark({"problem": "?", "solution": "3"}, "3")


@pytest.mark.slow  # sympy takes a second to load, twice
def test_equal_values_count_where_sympy_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        symbolic.comparison()
    except ConfigError:
        pytest.skip("sympy's LaTeX parser is not installed: pip install 'lopa[eval]'")
    assert BENCHMARKS["math"].mark(ROW, r"\boxed{2^{-1}}")["final-answer"]
    assert not BENCHMARKS["math_plain"].mark(ROW, r"\boxed{2^{-1}}")["final-answer"]
    assert not BENCHMARKS["math"].mark(ROW, r"\boxed{2^{-2}}")["final-answer"]
    # Its parser stops in silence at what it does not know, unless it is told to read all.
    assert not symbolic.is_same_value("2_3", "2_4") and not symbolic.is_same_value("x, 3", "x, 5")
    monkeypatch.setattr(symbolic, "TIME_LIMIT_S", 3.0)
    assert not BENCHMARKS["math"].mark(ROW, r"\boxed{9^{9^{9^{9}}}}")["final-answer"]


FOUND = {"sympy": "1.14.0", "antlr4-python3-runtime": "4.11.0"}


def test_what_compares_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "_version", FOUND.get)
    assert BENCHMARKS["math"].scored_by() == "sympy 1.14.0, antlr4-python3-runtime 4.11.0"
    assert BENCHMARKS["math_plain"].scored_by() == "texts and numbers"


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"sympy": None}, "sympy 1.13 or later, none is installed: run"),
        ({"sympy": "1.12.1"}, "sympy 1.13 or later, 1.12.1 is installed: run"),
        ({"antlr4-python3-runtime": None}, "antlr4-python3-runtime 4.11, none is installed: run"),
        ({"antlr4-python3-runtime": "4.13.2"}, "antlr4-python3-runtime 4.11, 4.13.2 is installed: run"),
        (dict.fromkeys(FOUND), "sympy 1.13 or later, none is installed and antlr4-python3-runtime 4.11, none is"),
    ],
)
def test_a_missing_parser_is_a_refusal_that_says_how_to_go_on(
    changed: dict[str, str | None], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic, "_version", {**FOUND, **changed}.get)
    with pytest.raises(ConfigError, match=missing) as refused:
        BENCHMARKS["math"].scored_by()
    assert "pip install 'lopa[eval]', or set input.benchmark to math_plain" in str(refused.value)


def test_a_library_that_the_cell_does_not_find_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(symbolic, "library_folders", lambda: [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"sympy 1\.13 or later, none is installed"):
        symbolic.comparison()


SAME = [
    (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("0.5", r"\frac12"), ("1/2", r"\tfrac{1}{2}"), (r"\frac1{2}", r"\frac{1}2"),
    (r"50\%", "50"), ("50%", r"50\%"), ("1,000", "1000"), (r"1{,}000", "1000"), (r"1\,000", "1000"), ("+5", "5"),
    ("5.", "5"), (r"90^\circ", "90"), (r"90^{\circ}", "90°"), (r"90\text{ degrees}", "90"), (r"\$5", "5"), ("$5$", "5"),
    (r"\left( 1, 2 \right)", "(1,2)"), (r"\text{east}", "east"), (r"5\text{ cm}", "5"), (r"5 \mathrm{cm}^2", "5"),
    (r"5\text{ meters per second}", "5"), ("(0.5, 2)", r"(\frac{1}{2},2)"), (r"\{1,2\}", r"\left\{1, 2\right\}"),
    ("x=5", "5"), (r"1\frac{1}{2}", r"\frac{3}{2}"), ("2 1/2", "2.5"), ("\u22125", "-5"), ("1e3", "1000"),
    ("10 + 8 = 18", "18"), (r"\textbf{(A)}", "(A)"), (r"\mathbf{5}", "5"), (r"\(5\)", "5"), ("0.50", "0.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("[1, 2)", "[1,2)"), (r"\frac{\pi}{2}", r"\dfrac{\pi}{2}"),
    (r"2\sqrt{3}", r"2\sqrt3"), ("x=2, y=3", "x = 2, y = 3"), ("\uff11\uff12", "12"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"1 \\ 2", r"1\\ 2"),
]  # fmt: skip
OTHER = [
    ("(1,2)", "(2,1)"), ("[1,2)", "(1,2)"), ("2,3", "2,5"), ("1,2", "2,1"), ("2_3", "2_4"), ("12_5", "12"), ("5", "-5"),
    (r"1\frac{1}{2}", r"\frac{1}{2}"), (r"50\%", "0.5"), ("x=2, y=3", "x=3,y=2"), ("x=2, y=3", "3"), ("1 2", "12"),
    ("x=2,y=3", "y=2, x=3"), (r"5\text{ PM}", r"5\text{ AM}"), (r"5\text{ million}", "5"), ("1.234", "1234"),
    ("0.3333", r"\frac13"), (r"\text{east}", r"\text{seat}"), ("east", "seat"), (r"2\text{ or }3", "23"), ("1 5", "15"),
    (r"x\in[1,2]", r"x\in[1,3]"), ("3", r"\{3,4\}"), ("", ""), ("x<2", "x<3"), ("ABC", "ACB"), ("1.5.3", "1.5"),
    ("2^3", "23"), ("(2,5]", "(2,5)"), (r"\frac{1}{2},3", r"\frac{1}{2},4"), (r"x=1\text{ or }x=2", "2"), ("6:5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_results_are_the_same_without_a_library(one: str, other: str) -> None:
    for pair in ((one, other), (other, one)):
        assert is_same_result(*pair, lambda *_: False)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_results_are_not(one: str, other: str) -> None:
    for pair in ((one, other), (other, one)):
        assert not is_same_result(*pair, lambda *_: False)


@pytest.mark.parametrize(
    ("one", "other"), [("0.3", r"\frac13"), (r"1\frac{1}{2}", r"\frac{1}{2}"), ("east", "seat"), ("1 2", "12")]
)
def test_numbers_and_words_are_never_left_to_sympy(one: str, other: str) -> None:
    assert not is_same_result(one, other, lambda *_: True)


@settings(max_examples=200, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 99), st.integers(-999, 999), st.integers(1, 99))
def test_fractions_are_compared_by_value(top: int, bottom: int, other_top: int, other_bottom: int) -> None:
    ways = [r"\frac{{{}}}{{{}}}", r"\dfrac{{{}}}{{{}}}", "{}/{}", r"$\tfrac{{{}}}{{{}}}$.", r"\left. {}/{} \right."]
    is_equal = Fraction(top, bottom) == Fraction(other_top, other_bottom)
    for way in ways:
        one, other = way.format(top, bottom), ways[0].format(other_top, other_bottom)
        assert is_same_result(one, other, lambda *_: not is_equal) is is_equal


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("\\boxed{}$fracsqrt[]#, 0123.-=ä\n"), max_size=60))
def test_any_text_is_marked(text: str) -> None:
    assert set(BENCHMARKS["gsm8k"].mark(GSM8K, text)) == {"number", "strict-match", "flexible-extract"}
    assert is_same_result(text, "3", lambda *_: False) in (True, False)
    normalized(text)
    boxed(text)
