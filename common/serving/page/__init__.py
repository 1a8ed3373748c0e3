"""The page that shows an answer being filled: one HTML file without anything external.

It is fed by `denoise` events, either those of a trace that comes with it or those of the server that serves it.
"""

from common.serving.page.html import colours, live_page, trace_page

__all__ = [
    "colours",
    "live_page",
    "trace_page",
]
