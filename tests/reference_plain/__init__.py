"""One request after another. `requests` is where to begin."""

from reference_plain.blocks import BlockStatus
from reference_plain.requests import PlainRequests, begun
from reference_plain.state import Branches, PlainRequest

__all__ = ["BlockStatus", "Branches", "PlainRequest", "PlainRequests", "begun"]
