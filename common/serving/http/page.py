"""What `/` answers with."""

from __future__ import annotations

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>lopa</title>
<p>An OpenAI-compatible server. POST to <code>/v1/chat/completions</code>, <code>/v1/completions</code> or
<code>/generate</code>.</p>
</html>
"""


def page_text() -> str:
    return _PAGE
