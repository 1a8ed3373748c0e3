"""An OpenAI-compatible server: `lopa serve`.

The process of rank 0 drives the engine and starts another one, the front end, which speaks HTTP. The two exchange small
messages once a step, so that no client, however slow, keeps a step waiting.
"""

from common.serving.engine.start import serve
from common.serving.events import DenoiseEvents, shown_settings
from common.serving.page import colours, trace_page

__all__ = ["DenoiseEvents", "colours", "serve", "shown_settings", "trace_page"]
