"""One request after another. `requests` is where to begin."""

from reference_plain.requests import PlainRequests

__all__ = ["PlainRequests"]
