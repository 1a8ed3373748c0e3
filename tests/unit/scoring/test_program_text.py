"""A right program is right in whatever an answer wraps it, and a wrong one wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from common.scoring.programs.text import program_of

HEAD = 'import math\n\ndef helper(x):\n    return x\n\n\ndef size(text: str) -> int:\n    """ Return length. """\n'
WHOLE = "def size(text):\n    return {}\n"
PROGRAMS = {
    "whole": WHOLE,
    "tabs": "def size(text):\n\tif text:\n\t\treturn {}\n\treturn 0\n",
    "lambda": "size = lambda text: {}\n",
    "annotated": "size: object = lambda text: {}\n",
    "imports": "import math\nfrom typing import List\n\n" + WHOLE,
    "future": "from __future__ import annotations\n\n" + WHOLE,
    "main": WHOLE + '\nif __name__ == "__main__":\n    print(size(input()))\n',
    "fence in a docstring": 'def size(text):\n    """Its\n\n    ```\n    size("a")\n    ```\n    """\n    return {}\n',
    "fence at the margin": 'def size(text):\n    """Length.\n```python\nsize("a")\n```\n    """\n    return {}\n',
    "fence in a string": 'def size(text):\n    mark = "```"\n    return {}\n',
    "fence in a comment": "def size(text):\n    # not ```text```\n    return {}\n",
    "text at the margin": 'def size(text):\n    many = """\nab\n  cd\n"""\n    return {} + len(many) - 9\n',
}
BODIES = {
    "body": "    return {}\n",
    "body at the margin": "return {}\n",
    "early return": "    if not text:\n        return 0\n    return {}\n",
    "long body": "    n = 0\n    n += {}\n    return n\n",
}


def indented(text: str, by: str) -> str:
    return textwrap.indent(text, by)


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "text": lambda code: code,
    "fence": lambda code: f"```\n{code}```",
    "language": lambda code: f"Here:\n\n```python\n{code}```\nDone.",
    "python3": lambda code: f"```python3\n{code}```",
    "title": lambda code: f'```py title="a.py"\n{code}```\n',
    "attributes": lambda code: f"``` {{.python .numberLines}}\n{code}```\n",
    "tildes": lambda code: f"~~~python\n{code}~~~\n",
    "four": lambda code: f"````python\n{code}````\n",
    "open": lambda code: f"Sure:\n```python\n{code}",
    "open and bare": lambda code: f"Sure:\n```\n{code}",
    "carriage returns": lambda code: f"Here:\n```python\n{code}```\nok".replace("\n", "\r\n"),
    "list": lambda code: "1. First:\n\n" + indented(f"```python\n{code}```", "   ") + "\n2. Done",
    "list of tabs": lambda code: "- a\n" + indented(f"```python\n{code}```", "\t") + "\n",
    "list's line": lambda code: "1. ```python\n" + indented(f"{code}```", "   ") + "\n",
    "only the fence in a list": lambda code: f"- a\n    ```python\n{code}    ```\n",
    "only the code indented": lambda code: "```python\n" + indented(code, "    ") + "```\n",
    "quotation": lambda code: "".join(f"> {line}\n" for line in f"```python\n{code}```".split("\n")),
    "bare quotation": lambda code: "".join(f"> {line}".rstrip() + "\n" for line in f"```python\n{code}```".split("\n")),
    "list in a quotation": lambda code: "".join(f">   {line}\n" for line in f"```python\n{code}```".split("\n")),
    "after text": lambda code: f"Here it is: ```python\n{code}```",
    "end on the last line": lambda code: f"```python\n{code.rstrip()}```",
    "text after the end": lambda code: f"```python\n{code}``` That is it.",
    "no end before the next": lambda code: f"```python\n{code}\n```python\nprint(1)\n```",
    "second": lambda code: f"Install:\n```bash\npip install numpy\n```\nThen\n```python\n{code}```\n```\n>>> 1\n1\n```",
    "example after": lambda code: f"```python\n{code}```\n\n```python\nprint(size('abc'))\nassert size('') == 1\n```",
    "in Markdown": lambda code: f"````markdown\n# Title\n```python\n{code}```\n````",
}  # fmt: skip
OF_WHOLE: dict[str, Callable[[str], str]] = {
    "head first": lambda code: f"The head:\n```python\ndef size(text):\n```\nAll:\n```python\n{code}```",
    "two": lambda code: f"```python\n{code}```\nOr:\n```python\ndef size(text): return -1\n```",
    "remarks": lambda code: f"Solution\n\n{code}\nNone\n",
    "a colon": lambda code: f"Answer: int\n{code}",
}


def size_of(program: str, text: str) -> Any:
    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(program, names)  # this file's own programs
        return names["size"](text)
    except Exception as error:
        return error


@pytest.mark.parametrize("wrapping", [*WRAPPINGS, *OF_WHOLE])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_is_found_in_any_wrapping(name: str, wrapping: str) -> None:
    wrap = {**WRAPPINGS, **OF_WHOLE}[wrapping]
    for prompt in ("", HEAD):
        right, wrong = (
            program_of(wrap(PROGRAMS[name].replace("{}", value)), "size", prompt) for value in ("len(text)", "7")
        )
        assert size_of(right, "abc") == 3
        assert size_of(wrong, "abc") == 7


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_found_in_any_wrapping(name: str, wrapping: str) -> None:
    for value, expected in (("len(text)", 3), ("7", 7), ("helper(2)", 2)):
        answer = WRAPPINGS[wrapping](BODIES[name].replace("{}", value))
        assert size_of(program_of(answer, "size", HEAD), "abc") == expected


@pytest.mark.parametrize("wrap", [
    lambda code: code,
    lambda code: f"{code}```\nOr:\n```python\ndef size(text): return -1\n```",
    lambda code: f"{code.rstrip()}```",
    lambda code: f"```python\n{code}```",
    lambda code: f"```\nHere:\n```python\n{code}```",
])  # fmt: skip
@pytest.mark.parametrize("code", [*PROGRAMS.values(), *BODIES.values()])
def test_an_answer_may_begin_inside_of_a_fence(code: str, wrap: Callable[[str], str]) -> None:
    for value, expected in (("len(text)", 3), ("7", 7)):
        program = program_of(wrap(code.replace("{}", value)), "size", HEAD, is_fence_open=True)
        assert size_of(program, "abc") == expected


@pytest.mark.parametrize(
    "text",
    [
        "import math\n```python\ndef size(text):\n    return math.floor(len(text))\n```",
        "```python\nimport math\n\ndef part(text):\n    return math.floor(len(text))\n```\nand\n"
        "```python\ndef size(text):\n    return part(text)\n```\nso\n```python\nimport none_such\nprint(1)\n```",
        "```python\ndef size(text):\n    return part(text)\n```\nwith\n```\ndef part(text): return len(text)\n```",
        "```def size(text): return len(text)```",
        "As ```size``` says:\n```python def size(text):\n    return len(text)\n```",
        "<pre><code class=\"language-python\">def size(text):\n    return 3 if 0 &lt; len(text) else 0\n</code></pre>",
        "For example\n```\n>>> size('a')\n1\n```\ndef size(text):\n    return len(text)\n",
        "```json\n{}\n```\n~~~\ndef size(text):\n    return len(text)\n~~~",
    ],
)  # fmt: skip
def test_a_program_may_stand_in_pieces_and_between_other_things(text: str) -> None:
    assert size_of(program_of(text, "size"), "abc") == 3


def test_a_fence_with_an_undefined_name_is_no_right_program() -> None:
    text = "```python\nundefined\ndef size(text):\n    return len(text)\n```"
    assert isinstance(size_of(program_of(text, "size"), "abc"), NameError)


def test_a_head_without_a_body_may_be_answered_by_a_whole_function() -> None:
    program = program_of(f"```python\n{WHOLE.format('len(text)')}```", "size", "def size(text):\n")
    assert size_of(program, "abc") == 3


@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 3_000, "```x\n~~~\n" * 2_000, "> " * 20_000 + "```", "- " * 20_000, "```def f(" * 2_000,
        "if x: pass\n" + "elif x: pass\n" * 900,
    ],
)  # fmt: skip
def test_fences_without_end_end_nothing(text: str) -> None:
    assert isinstance(program_of(text, "size"), str)
    assert isinstance(program_of(text, "size", HEAD, is_fence_open=True), str)
