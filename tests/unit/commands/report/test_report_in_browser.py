"""The report in a browser: in both themes, on a desk and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.commands.report.page import html_page
from common.commands.report.study import read_study

if TYPE_CHECKING:
    from tests.unit.serving.page.browser import Page

browser_parts = pytest.importorskip("tests.unit.serving.page.browser", exc_type=ImportError)

pytestmark = [pytest.mark.slow, browser_parts.needs_chromium]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [browser_parts.DESK, browser_parts.PHONE], ids=["desk", "phone"])
def test_every_text_can_be_read(page: Page, results: Path, size: tuple[int, int], scheme: str, tmp_path: Path) -> None:
    """Nothing but a table is wider than the screen, text has the contrast of WCAG AA, and bars have colours."""
    path = tmp_path / "report.html"
    path.write_text(html_page(read_study(results)), encoding="utf-8")
    page.open(path.as_uri(), size, scheme)
    assert page.count("figure svg") == 7
    page.driver.save_screenshot(str(tmp_path / "report.png"))
    assert page.ask("document.documentElement.scrollWidth") <= size[0]
    wide = f"[...document.querySelectorAll('body *')].filter({browser_parts.TOO_WIDE})"
    assert page.ask(f"{wide}.filter(one => !one.closest('.scroll')).map(one => one.tagName)") == []
    assert page.ask(browser_parts.CONTRAST) == []
    fills = page.ask("[...new Set([...document.querySelectorAll('.bar')].map(bar => getComputedStyle(bar).fill))]")
    assert len(fills) > 3 and "none" not in fills
    smallest = "Math.min(...[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height))"
    assert page.ask(smallest) >= 9
