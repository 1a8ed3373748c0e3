"""An OpenAI-compatible server: `lopa serve`.

The process of rank 0 drives the engine and starts another one, the front end, which speaks HTTP. The two exchange small
messages once a step, so that no client, however slow, keeps a step waiting. With several replicas a third kind starts
both (`engine.replicas`).
"""

from common.serving.batch_file import openai_records
from common.serving.engine.links import Links
from common.serving.engine.replicas import REPLICA, starts_replicas
from common.serving.engine.start import answer_requests, serve
from common.serving.events import DenoiseEvents, shown_settings
from common.serving.hosted import HostedServer
from common.serving.link import LENGTH_BYTES, Link, LinkClosed, framed
from common.serving.messages import Ready
from common.serving.page import colours, trace_page

__all__ = [
    "LENGTH_BYTES",
    "REPLICA",
    "DenoiseEvents",
    "HostedServer",
    "Link",
    "LinkClosed",
    "Links",
    "Ready",
    "answer_requests",
    "colours",
    "framed",
    "openai_records",
    "serve",
    "shown_settings",
    "starts_replicas",
    "trace_page",
]
