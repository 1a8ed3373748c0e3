"""The server's page in a browser: a prompt typed, its answer followed, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.serving.page.browser import WAIT_S, Page, filled_by, needs_chromium
from tests.unit.serving.page.replay_server import KEY, ReplayServer, serving

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture
def server(trace: dict[str, Any]) -> Iterator[ReplayServer]:
    with serving(trace) as started:
        yield started
        started.go.set()


def test_a_prompt_is_typed_and_its_answer_arrives(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    page.open(server.url)
    assert page.element("empty").is_displayed()
    page.element("settings").click()
    page.driver.find_element("name", "num_lookahead").send_keys("3")
    page.driver.find_element("name", "skip_threshold").send_keys("0.8")
    page.write("slow What is it?")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    assert page.text("state") == "decoding" and page.filled() == filled_by(trace, 2)
    server.go.set()
    total = len(trace["events"])
    page.wait(lambda: page.text("place") == f"Pass {total} of {total}" and page.element("send").is_enabled())
    assert page.filled() == filled_by(trace, total)
    assert page.text("state").startswith("ended")
    (body,) = server.bodies
    assert body == {
        "messages": [{"role": "user", "content": "slow What is it?"}], "stream": True, "stream_mode": "denoise",
        "diffusion": {"num_lookahead": 3, "skip_threshold": 0.8}, "return_logprob": True, "top_logprobs_num": 4,
    }  # fmt: skip
    page.ask("document.getElementById('cell-0').click()")
    assert page.text("inspected").endswith("most probable then: “ cat” 60.7 %, “↵” 22.3 %")
    assert page.text("answer") == trace["answer"]["text"]
    page.press("ARROW_LEFT")
    assert page.text("place") == f"Pass {total} of {total}", "the prompt box has its own use for the key"
    page.press("ESCAPE", "HOME", "ARROW_RIGHT")
    assert page.filled() == filled_by(trace, 1)


def test_an_example_plays_and_says_what_is_served(page: Page, server: ReplayServer) -> None:
    page.open(server.url, moves=True)
    assert page.text("about") == "Serves m: k 3"
    assert page.text("place") != "Pass 8 of 8"
    page.wait(lambda: page.text("place") == "Pass 8 of 8")
    assert page.text("answer").endswith("#### 17")
    assert page.element("empty").is_displayed() and not server.bodies
    page.element("send").click()
    page.wait(lambda: page.text("state").startswith("ended") and not page.element("empty").is_displayed())
    assert server.bodies[0]["messages"][0]["content"] == page.element("prompt").get_attribute("placeholder")


def test_a_pause_keeps_what_arrives_for_later(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    page.open(server.url)
    page.ask("document.getElementById('speed').value = '25'")
    page.write("slow What is it?")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    page.element("play").click()
    server.go.set()
    total = len(trace["events"])
    page.wait(lambda: page.text("place") == f"Pass 2 of {total}")
    assert page.filled() == filled_by(trace, 2)
    page.element("play").click()
    page.wait(lambda: page.text("place") == f"Pass {total} of {total}")


def test_a_key_is_asked_for_and_sent(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    server.wants_key = True
    page.open(server.url)
    page.write("hello")
    assert "wants an API key" in page.problem()
    assert page.ask("document.activeElement.id") == "key"
    page.press(KEY)
    page.write("hello")
    page.wait(lambda: page.text("place").endswith(f"of {len(trace['events'])}"))
    assert not page.element("problem").is_displayed()


def test_plain_text_and_a_limit_are_sent_as_such(page: Page, server: ReplayServer) -> None:
    page.open(server.url)
    page.ask("document.getElementById('kind').value = 'text'")
    page.element("settings").click()
    page.driver.find_element("name", "max_tokens").send_keys("32")
    page.write("hello")
    page.wait(lambda: not page.element("empty").is_displayed() and page.text("state").startswith("ended"))
    asked = {"prompt": "hello", "stream": True, "stream_mode": "denoise", "max_tokens": 32, "diffusion": {}}
    assert server.bodies == [{**asked, "return_logprob": True, "top_logprobs_num": 4}]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("refuse 503", "The server takes no request now.the queue is full. Try again in 3 seconds."),
        ("refuse 400", "The server refused the request (400).the queue is full."),
        ("refuse 404", "This server has no /generate."),
        ("break", "The stream broke off."),
        ("fail", "The server gave up on this request.out of memory"),
    ],
)
def test_what_goes_wrong_is_said(page: Page, server: ReplayServer, prompt: str, said: str) -> None:
    page.open(server.url)
    page.write(prompt)
    assert page.problem().startswith(said)
    assert page.element("send").is_enabled() and not page.element("stop").is_enabled()
    has_begun = prompt in ("break", "fail")
    assert page.element("empty").is_displayed() != has_begun
    if has_begun:
        assert page.text("place") == "Pass 2 of 2"


def test_a_number_that_a_field_does_not_take_is_shown_and_not_sent(page: Page, server: ReplayServer) -> None:
    page.open(server.url)
    page.write("refuse 503")
    page.problem()
    page.element("settings").click()
    page.driver.find_element("name", "skip_threshold").send_keys("2")
    page.element("settings").find_element("tag name", "summary").click()
    page.element("send").click()
    assert page.ask("document.activeElement.name") == "skip_threshold" and len(server.bodies) == 1
    assert not page.element("problem").is_displayed(), "it was of another request"


def test_a_server_that_is_gone_is_said(page: Page, trace: dict[str, Any]) -> None:
    with serving(trace) as server:
        page.open(server.url)
    page.write("hello")
    assert "The server does not answer." in page.problem()
    assert "lopa serve" in page.problem()


def test_stop_ends_the_request_and_keeps_what_has_come(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    page.open(server.url)
    page.write("slow What is it?")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    page.element("stop").click()
    page.wait(lambda: page.element("send").is_enabled())
    assert page.text("state") == "stopped" and not page.element("problem").is_displayed()
    server.go.set()
    assert server.is_gone.wait(WAIT_S), "the server learns that nobody reads any more"


def test_an_answer_stays_until_the_next_one_comes(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    total = len(trace["events"])
    page.open(server.url)
    page.write("first")
    page.wait(lambda: page.text("answer") == trace["answer"]["text"])
    page.write("refuse 503")
    page.problem()
    assert page.text("answer") == trace["answer"]["text"]
    page.write("slow once more")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    server.go.set()
    page.wait(lambda: page.text("place") == f"Pass {total} of {total}")
    assert not page.element("problem").is_displayed()
