"""A browser without a window, and what a user sees of the page in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[browser]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
# No window and nothing of its own over the network.
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_S = 60.0
PHONE, DESK = (390, 844), (1400, 1000)

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
    const exempt = element.closest(":disabled, .hidden, script, style, option, title");
    const style = getComputedStyle(element);
    if (!own || exempt || !element.checkVisibility()) continue;
    const behind = [];
    for (let node = element; node; node = node.parentElement) behind.unshift(getComputedStyle(node).backgroundColor);
    const one = luminance(behind), ink = style[element instanceof SVGElement ? "fill" : "color"];
    const other = luminance([...behind, ink]);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const name = element.getAttribute("class");
    if (ratio < 4.5) poor.push(`${element.textContent.slice(0, 20)} ${name} ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""

# Backgrounds of elements, as red, green and blue from 0 to 255.
COLOURS = """[...document.querySelectorAll(arguments[0])].map((element) => {
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  context.fillStyle = getComputedStyle(element).backgroundColor;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
})"""

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)


class Page:
    """What a user sees and does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, size: tuple[int, int] = DESK, scheme: str = "light", *, moves: bool = False) -> None:
        """moves: for a user who has not asked for less motion, to whom the page plays what it holds."""
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "no-preference" if moves else "reduce"}
        told = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})
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

    def filled(self) -> set[int]:
        """Places of the canvas that are no masks."""
        return set(self.ask("[...document.querySelectorAll('#canvas .filled')].map(cell => Number(cell.id.slice(5)))"))

    def write(self, prompt: str) -> None:
        """Type it, and send it by Ctrl+Enter."""
        self.element("prompt").clear()
        self.element("prompt").send_keys(prompt, webdriver.Keys.CONTROL + webdriver.Keys.ENTER)

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"{self.text('place')}; {self.text('problem')}; {self.text('state')}"
            time.sleep(0.02)

    def require_no_errors(self) -> None:
        """Since the last call: errors of a script, and what the page's policy had to refuse. Refusals of the server are
        none."""
        assert [entry["message"] for entry in self.driver.get_log("browser") if entry["source"] != "network"] == []

    def problem(self) -> str:
        """What the page says of it, once it does."""
        self.wait(lambda: self.element("problem").is_displayed())
        return self.text("problem")


@contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """profile: an empty folder for what the browser remembers."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()


def filled_by(trace: dict[str, Any], num_passes: int) -> set[int]:
    return {
        position - event["prompt_length"] for event in trace["events"][:num_passes] for position, *_ in event["filled"]
    }
