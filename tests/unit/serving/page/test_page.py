"""The page: one file that needs nothing else, in which hostile text stays text."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

from common.serving.page import live_page, trace_page

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "&lt;/script&gt;",
    "\u2028\u2029",
    "\ud83d",
    "@SCRIPT@ @TRACE@ @STYLE@",
    '"}; alert(1); //',
    "\0\x1b",
]

LIVE = live_page("m", {"num_lookahead": 3})


class Elements(HTMLParser):
    """Every element that a browser would see, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            kind = self.tags[-1][1].get("type") or self.tags[-1][0]
            self.texts.append((kind, data))


def data_of(page: str) -> Any:
    (text,) = (text for kind, text in Elements(page).texts if kind == "application/json")
    return json.loads(text)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_comes_back_as_it_was_and_adds_no_element(text: str) -> None:
    trace = {"prompt": text, text: [text]}
    page = trace_page(trace)
    assert data_of(page) == trace
    assert len(Elements(page).tags) == len(Elements(LIVE).tags)
    page.encode("utf-8")


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    tags = Elements(LIVE).tags
    assert not [tag for tag, _ in tags if tag in ("link", "img", "iframe", "object", "embed", "base", "audio", "video")]
    named = [name for _, attributes in tags for name in attributes if name in ("src", "href", "srcset", "action")]
    named += [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert named == []
    assert not re.search(r"https?://|url\(|@import|\bimport\b", LIVE)


def test_only_the_own_script_and_style_may_run() -> None:
    elements = Elements(LIVE)
    (policy,) = (a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    hashes = {kind: b64encode(sha256(text.encode()).digest()).decode() for kind, text in elements.texts}
    assert policy is not None and "unsafe" not in policy and policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{hashes['script']}'" in policy
    assert f"style-src 'sha256-{hashes['style']}'" in policy


def test_the_scripts_make_no_markup_of_text() -> None:
    (script,) = (text for kind, text in Elements(LIVE).texts if kind == "script")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", script
    )


def test_a_live_page_holds_what_is_served_and_an_example() -> None:
    data = data_of(LIVE)
    assert data["model"] == "m" and data["settings"] == {"num_lookahead": 3}
    assert "events" not in data and data["example"]["answer"]["text"].endswith("#### 17")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_a_browser_cannot_read_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        trace_page({"seconds": [number]})


def test_every_element_that_a_script_looks_up_is_there() -> None:
    elements = Elements(LIVE)
    (script,) = (text for kind, text in elements.texts if kind == "script")
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    made = set(re.findall(r'\bid: "([\w-]+)"', script))
    assert set(re.findall(r'byId\("([\w-]+)"\)', script)) <= set(ids) | made
