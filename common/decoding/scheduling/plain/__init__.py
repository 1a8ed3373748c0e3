"""One request after another. `requests` is where to begin."""

from common.decoding.scheduling.plain.blocks import BlockStatus
from common.decoding.scheduling.plain.requests import PlainRequests, begun
from common.decoding.scheduling.plain.state import Branches, PlainRequest

__all__ = ["BlockStatus", "Branches", "PlainRequest", "PlainRequests", "begun"]
