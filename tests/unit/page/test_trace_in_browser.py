"""A trace's page in a browser: played, paused, stepped through, in both themes and on a phone's width."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.commands.main import app
from common.page import trace_page
from tests.unit.page.browser import DESK, PHONE, Page, filled_by, needs_chromium

MODEL = Path(__file__).parents[3] / "models" / "demo"

pytestmark = [pytest.mark.slow, needs_chromium]


# In the player too, which does not scroll with the page.
TOO_WIDE = "one => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 0.5"

# What has less contrast, as texts; a canvas turns any CSS colour into numbers.
CONTRAST = """(() => {
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  const luminance = (colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const exempt = element.closest(".dropped, :disabled, .hidden, script, style, option");
    if (!own || exempt || !element.checkVisibility()) continue;
    const behind = [];
    for (let node = element; node; node = node.parentElement) behind.unshift(getComputedStyle(node).backgroundColor);
    const one = luminance(behind), other = luminance([...behind, getComputedStyle(element).color]);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push(`${element.textContent.slice(0, 20)} ${element.className} ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""


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
    page.ask("document.getElementById('speed').value = '4'")
    page.press("r")
    page.wait(lambda: page.text("place") == f"Pass 1 of {total}")
    page.press(" ")
    paused = page.text("place")
    time.sleep(0.6)
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
    assert page.count("#canvas.by-confidence") == 1


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
