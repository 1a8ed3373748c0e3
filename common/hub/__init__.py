"""Repositories of model hubs by name: `hf://OWNER/NAME[@REVISION]` and `modelscope://OWNER/NAME[@REVISION]` as folders.

A name is asked of a hub only where it has a scheme; a text without one is a path. Files of weights (safetensors), of
settings and of tokenizers are fetched, programs and pickles never, into the cache that the hub's own tools share.
"""

from common.hub.fetch import fetch, weight_bytes
from common.hub.name import HubName, is_hub_name, known_as, name_of, scheme_hint

__all__ = ["HubName", "fetch", "is_hub_name", "known_as", "name_of", "scheme_hint", "weight_bytes"]
