"""A trace's page in a browser: played, paused, stepped through, in both themes and on a phone's width."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.commands.main import app
from common.serving.page import trace_page
from tests.unit.serving.page.browser import (
    COLOURS,
    CONTRAST,
    DESK,
    PHONE,
    TOO_WIDE,
    Page,
    filled_by,
    needs_chromium,
    webdriver,
)

MODEL = Path(__file__).parents[4] / "models" / "demo"

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture(scope="module")
def file_url(trace: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "out.html"
    path.write_text(trace_page(trace), encoding="utf-8")
    return path.as_uri()


def test_a_trace_is_stepped_through_by_keys(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    total = len(trace["events"])
    assert page.text("asked") == trace["prompt"]
    assert page.text("place") == f"Pass {total} of {total}"
    assert page.text("answer") == trace["answer"]["text"]
    page.press("HOME")
    assert page.filled() == set() and page.text("answer") == ""
    for number in range(1, total + 1):
        page.press("ARROW_RIGHT")
        assert page.text("place") == f"Pass {number} of {total}"
        assert page.filled() == filled_by(trace, number)
        assert page.count("#canvas .fresh") == len(trace["events"][number - 1]["filled"])
        wins = [one for one in trace["events"][:number] if one["winner"] < len(one["branch_scores"]) - 1]
        assert page.count("#canvas .won") == len(wins)
        assert page.count("#branches tr") == len(trace["events"][number - 1]["branch_scores"])
        assert (
            page.ask("[...document.querySelectorAll('#branches tr')].findIndex(row => row.className === 'winner')")
            == (trace["events"][number - 1]["winner"])
        )
    rates = page.ask(
        "[...document.querySelectorAll('#rates tr')].map(row => [...row.children].map(at => at.textContent))"
    )
    filled, answer, seconds = len(filled_by(trace, total)), trace["answer"]["length"], trace["seconds"][-1]
    assert rates == [
        [name, str(count), f"{count / total:.2f}", f"{count / seconds:.0f}"]
        for name, count in (("Filled", filled), ("Answer", answer))
    ]
    page.press("ARROW_LEFT", "ARROW_LEFT")
    assert page.filled() == filled_by(trace, total - 2)
    assert f"Pass {total - 2} of {total}: " in page.text("status")
    page.press("END")
    assert page.filled() == filled_by(trace, total)


@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="models/demo holds no checkpoint")
def test_what_lopa_trace_writes_opens_and_plays(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the profile sets it
    out, question = tmp_path / "out.html", "Tom has 12 apples and buys 5 more. How many apples does he have now?"
    written = CliRunner().invoke(app, ["trace", question, "--html", str(out), "--set", f"model={MODEL}"])
    assert written.exit_code == 0, written.output
    page.open(out.as_uri())
    assert page.text("asked") == question
    assert page.text("answer") == written.stdout.rstrip("\n") and "17" in page.text("answer")
    page.ask("document.getElementById('speed').value = 'real'")
    page.press("r")
    page.wait(lambda: page.text("answer") != written.stdout.rstrip("\n"))
    page.wait(lambda: page.text("answer") == written.stdout.rstrip("\n"))
    page.press("HOME", "ARROW_RIGHT")
    assert page.text("place").startswith("Pass 1 of ") and page.count("#canvas .fresh") >= 1


def test_the_blocks_have_the_states_of_the_scheduler(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    page.press("HOME")
    for number, event in enumerate(trace["events"], start=1):
        page.press("ARROW_RIGHT")
        filled, cached = filled_by(trace, number), event["start"] + event["commit_length"] - event["prompt_length"]
        expected = [
            "active" if not set(range(first, first + 8)) <= filled else "cached" if first + 8 <= cached else "full"
            for first in range(0, event["canvas_length"], 8)
        ]
        states = page.ask("[...document.querySelectorAll('.block-state')].map(state => state.className.split(' ')[1])")
        assert states == expected
    assert {"active", "full", "cached"} >= set(expected)


def test_edits_and_the_borders_of_blocks_from_position_0(
    page: Page, edited_trace: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "edited.html"
    path.write_text(trace_page(edited_trace), encoding="utf-8")
    page.open(path.as_uri())
    assert page.text("answer") == edited_trace["answer"]["text"]
    sizes = "[...document.querySelectorAll('#canvas .cells')].map(grid => grid.children.length)"
    assert page.ask(sizes) == [1, 4, 4, 4, 4], "the first block begins in the prompt"
    page.press("HOME")
    histories: dict[int, list[tuple[int, int]]] = {}
    for number, event in enumerate(edited_trace["events"], start=1):
        page.press("ARROW_RIGHT")
        for position, token, *_ in (*event["filled"], *event["edited"]):
            histories.setdefault(position - 7, []).append((number, token))
        marked = "[...document.querySelectorAll('#canvas .edited')].map(cell => Number(cell.id.slice(5)))"
        assert page.ask(marked) == sorted(place for place, history in histories.items() if len(history) > 1)
        for place, *_ in ((position - 7, token) for position, token, *_ in event["edited"]):
            *before, last = histories[place]
            page.ask("document.getElementById(arguments[0]).click()", f"cell-{place}")
            shown = page.text("inspected")
            assert f"token {last[1]}, replaced in pass {last[0]}" in shown
            assert all(f"token {token}, from pass {made}" in shown for made, token in before)
        assert page.filled() == set(histories)
        if event["edited"]:
            page.press("ARROW_LEFT", "ARROW_RIGHT")
            assert f"{len(event['edited'])} replaced" in page.text("status")
    assert any(event["edited"] for event in edited_trace["events"])


def test_a_mask_says_what_is_most_probable(page: Page, trace: dict[str, Any], tmp_path: Path) -> None:
    first, *others = trace["events"]
    end = first["prompt_length"] + first["canvas_length"]
    position = next(position for event in others for position, *_ in event["filled"] if position < end)
    first = {**first, "predicted": [[position, 5, " a", 0.25]]}
    path = tmp_path / "predicted.html"
    path.write_text(trace_page({**trace, "events": [first, *others]}), encoding="utf-8")
    page.open(path.as_uri())
    page.press("HOME", "ARROW_RIGHT")
    page.ask("document.getElementById(arguments[0]).click()", f"cell-{position - first['prompt_length']}")
    assert "most probable: “ a” 25.0 %" in page.text("inspected").replace("␣", " ")


def test_what_is_given_is_there_before_the_first_pass(page: Page, trace: dict[str, Any], tmp_path: Path) -> None:
    """The tokens of the first pass, as if the request had brought them."""
    first, *others = trace["events"]
    given = [[position, token, text] for position, token, text, _ in first["filled"]]
    path = tmp_path / "given.html"
    changed = {**trace, "events": [{**first, "filled": [], "given": given, "num_won": 0}, *others]}
    path.write_text(trace_page(changed), encoding="utf-8")
    page.open(path.as_uri())
    page.press("HOME")
    places = sorted(position - first["prompt_length"] for position, *_ in given)
    marked = "[...document.querySelectorAll('#canvas .given')].map(cell => Number(cell.id.slice(5)))"
    assert page.ask(marked) == places and "given by the request" in page.text("legend")
    page.ask("document.getElementById(arguments[0]).click()", f"cell-{places[0]}")
    assert page.text("inspected").endswith(", given by the request")


def test_hostile_tokens_are_shown_as_text(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    shown = page.cells()
    assert "</script>" in shown and "<b>x</b>" in shown and "&amp;" in shown
    assert "␣" in shown and "↵" in shown
    assert page.count("#stage b, #stage script") == page.count(".block-head b, .inspected b")
    assert page.count("script") == 2


def test_it_plays_pauses_and_replays(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    total = len(trace["events"])
    page.ask("document.getElementById('speed').value = '25'")
    page.press("r")
    page.wait(lambda: page.text("place") == f"Pass {total} of {total}")
    page.wait(lambda: page.element("play").get_attribute("aria-label") == "Play")
    page.ask("document.getElementById('speed').value = '1'")
    page.press("r")
    page.wait(lambda: page.text("place") != f"Pass {total} of {total}")
    page.press(" ")
    paused = page.text("place")
    time.sleep(2)  # twice as long as a pass is shown
    assert page.text("place") == paused
    page.element("play").click()
    page.wait(lambda: page.text("place") != paused)
    page.element("back").click()
    assert page.element("play").get_attribute("aria-label") == "Play", "a step pauses"


def test_cells_are_reached_by_keys_and_described(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    page.ask("document.getElementById('canvas').focus()")
    page.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert page.text("place").startswith(f"Pass {len(trace['events'])} "), "the arrows belong to the canvas now"
    active = page.element("canvas").get_attribute("aria-activedescendant")
    assert active == "cell-1"
    position = trace["events"][0]["prompt_length"] + 1
    ((number, token),) = [
        (event["pass"], token) for event in trace["events"] for place, token, *_ in event["filled"] if place == position
    ]
    assert f"token {token}, filled in pass {number}" in page.text("inspected")
    page.press("c")
    assert page.count("#stage.by-confidence") == 1


def test_the_cell_of_a_branch_is_lit_under_the_pointer_and_under_the_focus(
    page: Page, trace: dict[str, Any], file_url: str
) -> None:
    page.open(file_url)
    page.press("HOME", "ARROW_RIGHT", "ARROW_RIGHT")
    event = trace["events"][0]
    lit = "[...document.querySelectorAll('#canvas .pointed')].map(cell => cell.id)"
    for number, (fills, _) in enumerate(event["lookahead"], start=1):
        places = [f"cell-{position - event['prompt_length']}" for position, *_ in fills]
        row = page.driver.find_element("css selector", f"#branches tr:nth-child({number})")
        webdriver.ActionChains(page.driver).move_to_element(row).perform()
        assert page.ask(lit) == places
        webdriver.ActionChains(page.driver).move_to_element(page.element("answer")).perform()
        assert page.ask(lit) == []
        page.ask("arguments[0].focus()", row)
        assert page.ask(lit) == places
    page.press("ARROW_RIGHT")
    focused = "[...document.querySelectorAll('#branches tr')].indexOf(document.activeElement)"
    assert page.ask(focused) == len(event["lookahead"]) - 1, "a step leaves the focus where it was"


def test_a_phone_has_the_branches_beside_the_canvas(page: Page, file_url: str) -> None:
    page.open(file_url, PHONE)
    edges = "document.querySelector(arguments[0]).getBoundingClientRect().toJSON()"
    canvas, branches = page.ask(edges, ".canvas-card"), page.ask(edges, ".branches-card")
    assert canvas["top"] == branches["top"] and canvas["right"] < branches["left"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_passes_have_colours_that_can_be_told_apart(page: Page, file_url: str, scheme: str) -> None:
    page.open(file_url, DESK, scheme)
    colours = page.ask(COLOURS, ".ramp .cell")
    assert len(colours) == 8
    assert all(math.dist(one, other) > 22 for one, other in pairwise(colours)), colours


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_text_can_be_read(page: Page, file_url: str, size: tuple[int, int], scheme: str, tmp_path: Path) -> None:
    """Nothing is wider than the screen, and text has the contrast of WCAG AA: 4.5 to 1."""
    page.open(file_url, size, scheme)
    for _ in range(4):
        page.press("ARROW_LEFT")
    for colour in ("pass", "confidence"):
        page.driver.save_screenshot(str(tmp_path / f"{colour}.png"))
        assert page.ask("document.documentElement.scrollWidth") <= size[0]
        assert page.ask(f"[...document.querySelectorAll('body *')].filter({TOO_WIDE}).map(one => one.id)") == []
        assert page.ask(CONTRAST) == []
        page.press("c")
