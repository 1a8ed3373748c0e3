"""The page in a browser: typed into, played, paused, stepped through, in both themes and on a phone's width."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.commands.main import app
from common.config import DecodeConfig
from common.page import trace_page
from common.serving import DenoiseEvents
from tests.unit.decoding.test_scheduler import run
from tests.unit.page.replay_server import KEY, ReplayServer, serving

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[browser]'")

MODEL = Path(__file__).parents[3] / "models" / "demo"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
WAIT_S = 10.0
PHONE, DESK = (390, 844), (1400, 1000)
# Texts of the tokens, by id modulo their number: what a page must not take for markup, and what cannot be seen.
TEXTS = (" the", " cat", "</script>", "<b>x</b>", " ", "\n", "ü", " internationalisation", "&amp;", "7")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
    ),
]


def text_of(ids: Any) -> str:
    return "".join(TEXTS[token % len(TEXTS)] for token in ids)


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    """Of a scripted model: 48 positions in blocks of 8."""
    decode = DecodeConfig(num_lookahead=3, block_size=8, max_new_tokens=48, skip_threshold=0.8, stop_at_eos=False)
    _, (completion,), records = run(decode, seed=3)
    told = DenoiseEvents(completion.prompt_length, text_of)
    events = [told.of(record) for record in records]
    events[-1]["finished"] = completion.finish_reason
    return {
        "model": "scripted",
        "profile": "test",
        "prompt": "What <i>is</i> it?",
        "settings": {"strategy": "d2f", "num_lookahead": 3, "block_size": 8, "sampling_strategy": "neg_entropy"},
        "answer": {"text": text_of(completion.token_ids), "length": len(completion.token_ids)},
        "num_lookahead_wins": completion.num_lookahead_wins,
        "seconds": [0.01 * (number + 1) for number in range(len(events))],
        "events": events,
    }


class Page:
    """What a user sees and does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.driver.get(url)

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def element(self, id: str) -> Any:
        return self.driver.find_element("id", id)

    def text(self, id: str) -> str:
        return str(self.ask("document.getElementById(arguments[0]).textContent", id))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(webdriver.Keys, key, key))

    def cells(self) -> list[str]:
        return list(self.ask("[...document.querySelectorAll('#canvas .token')].map(cell => cell.textContent)"))

    def count(self, selector: str) -> int:
        return int(self.ask("document.querySelectorAll(arguments[0]).length", selector))

    def write(self, prompt: str) -> None:
        self.element("prompt").clear()
        self.element("prompt").send_keys(prompt, webdriver.Keys.CONTROL + webdriver.Keys.ENTER)

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"{self.text('place')}; {self.text('problem')}; {self.text('state')}"
            time.sleep(0.02)

    def problem(self) -> str:
        self.wait(lambda: self.element("problem").is_displayed())
        return self.text("problem")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("browser")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()


@pytest.fixture(autouse=True)
def nothing_went_wrong_unseen(page: Page) -> Iterator[None]:
    """No error of a script, and nothing that the page's policy had to refuse."""
    yield
    entries = page.driver.get_log("browser")
    assert [entry["message"] for entry in entries if entry["source"] not in ("network",)] == []


@pytest.fixture(scope="module")
def file_url(trace: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "out.html"
    path.write_text(trace_page(trace), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def server(trace: dict[str, Any]) -> Iterator[ReplayServer]:
    with serving(trace) as started:
        yield started
        started.go.set()


def filled_by(trace: dict[str, Any], num_passes: int) -> set[int]:
    return {
        position - event["prompt_length"] for event in trace["events"][:num_passes] for position, *_ in event["filled"]
    }


def filled_on(page: Page) -> set[int]:
    return set(page.ask("[...document.querySelectorAll('#canvas .filled')].map(cell => Number(cell.id.slice(5)))"))


def test_a_trace_is_stepped_through_by_keys(page: Page, trace: dict[str, Any], file_url: str) -> None:
    page.open(file_url)
    total = len(trace["events"])
    assert page.text("asked") == trace["prompt"]
    assert page.text("place") == f"Pass {total} of {total}"
    assert page.text("answer") == trace["answer"]["text"]
    page.press("HOME")
    assert filled_on(page) == set() and page.text("answer") == ""
    for number in range(1, total + 1):
        page.press("ARROW_RIGHT")
        assert page.text("place") == f"Pass {number} of {total}"
        assert filled_on(page) == filled_by(trace, number)
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
    assert filled_on(page) == filled_by(trace, total - 2)
    assert f"Pass {total - 2} of {total}: " in page.text("status")
    page.press("END")
    assert filled_on(page) == filled_by(trace, total)


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


def test_a_prompt_is_typed_and_its_answer_arrives(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    page.open(server.url)
    assert page.element("empty").is_displayed()
    page.element("settings").click()
    page.driver.find_element("name", "num_lookahead").send_keys("3")
    page.driver.find_element("name", "skip_threshold").send_keys("0.8")
    page.write("slow What is it?")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    assert page.text("state") == "decoding" and filled_on(page) == filled_by(trace, 2)
    server.go.set()
    total = len(trace["events"])
    page.wait(lambda: page.text("place") == f"Pass {total} of {total}" and page.element("send").is_enabled())
    assert filled_on(page) == filled_by(trace, total)
    assert page.text("state").startswith("ended")
    (body,) = server.bodies
    assert body == {
        "messages": [{"role": "user", "content": "slow What is it?"}], "stream": True, "stream_mode": "denoise",
        "diffusion": {"num_lookahead": 3, "skip_threshold": 0.8},
    }  # fmt: skip
    assert page.text("answer") == trace["answer"]["text"]
    page.element("first").click()
    page.element("next").click()
    assert filled_on(page) == filled_by(trace, 1)


def test_a_pause_keeps_what_arrives_for_later(page: Page, server: ReplayServer, trace: dict[str, Any]) -> None:
    page.open(server.url)
    page.ask("document.getElementById('speed').value = '25'")
    page.write("slow What is it?")
    page.wait(lambda: page.text("place") == "Pass 2 of 2")
    page.element("play").click()
    server.go.set()
    total = len(trace["events"])
    page.wait(lambda: page.text("place") == f"Pass 2 of {total}")
    assert filled_on(page) == filled_by(trace, 2)
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
    page.wait(lambda: page.text("state").startswith("ended"))
    expected = {"prompt": "hello", "stream": True, "stream_mode": "denoise", "max_tokens": 32, "diffusion": {}}
    assert server.bodies == [expected]


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
    assert page.element("stage").is_displayed() == has_begun
    assert page.element("empty").is_displayed() != has_begun
    if has_begun:
        assert page.text("place") == "Pass 2 of 2"


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
