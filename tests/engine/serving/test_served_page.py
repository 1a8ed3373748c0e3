"""The page that the server serves, used against that server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.serving.served import QUESTION, Served
from tests.unit.serving.page.browser import Page, browsing, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("secret\n")
    with Served(tmp_path_factory.mktemp("served") / "log", "--api-key-file", str(keys)) as server:
        yield server


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path / "browser") as started:
        yield started
        started.require_no_errors()


def test_an_answer_is_followed_and_what_the_server_refuses_is_said(served: Served, page: Page) -> None:
    page.open(served.url)
    page.write(QUESTION.format(12))
    assert "no valid API key" in page.problem()
    page.press("secret")
    page.write(QUESTION.format(12))
    page.wait(lambda: page.text("state").startswith("ended") and page.element("send").is_enabled())
    assert "17" in page.text("answer")
    last = int(page.element("pass").get_attribute("max"))
    assert page.count("#canvas .filled") > last > 1, "more tokens than passes"
    page.ask("document.getElementById('cell-0').click()")
    assert page.text("inspected").count(" %") == 4, "the most probable four"
    page.press("ARROW_LEFT")  # of the prompt box, not of the player
    assert page.text("place") == f"Pass {last} of {last}"
    page.element("back").click()
    assert page.text("place") == f"Pass {last - 1} of {last}"
    page.element("format").send_keys("(yes|no)")
    page.write("is it so?")
    page.wait(lambda: page.text("answer") in ("yes", "no") and page.element("send").is_enabled())
    page.element("format").clear()
    page.driver.find_element("name", "num_lookahead").send_keys("99")
    page.write("one more")
    assert "num_lookahead: 99 is more than" in page.problem()
    assert served.is_empty()
