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
WAIT_S = 10.0
PHONE, DESK = (390, 844), (1400, 1000)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)


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
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
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
