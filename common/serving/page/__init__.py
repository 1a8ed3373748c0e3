"""The page that shows an answer being filled: one HTML file without anything external.

It is fed by `denoise` events, either those of a trace that comes with it or those of the server that serves it. The
browser runs the scripts and styles that are hashed in the page's Content-Security-Policy and no others. What a
trace holds is data: nothing in it can end its element, and the scripts show it as text.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = ("text", "replay", "canvas", "panels", "player", "live", "main")  # in the order in which they build up
_ESCAPES = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&"})


def live_page(model: str | None, settings: Mapping[str, Any]) -> str:
    """Return the page with a prompt box, which asks the server that served it: POST generate, beside the page's own
    path. It plays an example until then.

    model, settings: what is served, where everybody may know it; else None and nothing.
    """
    return _with_data({"model": model, "settings": settings, "example": json.loads(_part("example.json"))})


@cache
def colours() -> str:
    """Return the style of the pages' colours, on light pages and on dark ones: variables such as --ink of the whole
    page."""
    root, brace, _ = _part("page.css").partition("}\n")
    return root + brace


def trace_page(trace: Mapping[str, Any]) -> str:
    """Return the page that replays a trace, as `common.evaluation.record_trace` makes it.

    Raises ValueError for what JSON cannot hold, NaN and infinity among it.
    """
    return _with_data(trace)


def _with_data(shown: Mapping[str, Any]) -> str:
    before, after = _page()
    data = json.dumps(shown, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return f"{before}{data.translate(_ESCAPES)}{after}"


@cache
def _page() -> tuple[str, str]:
    """Return what stands before and after the data."""
    style, script = _part("page.css"), "\n".join(_part(f"js/{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n{script}'
    page = _part("page.html").replace("@STYLE_HASH@", _hash(style)).replace("@SCRIPT_HASH@", _hash(script))
    before, _, after = page.replace("@STYLE@", style).replace("@SCRIPT@", script).partition("@TRACE@")
    return before, after


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy names what may run."""
    return f"sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
