"""One request after another. `requests` is where to begin."""

from common.decoding.scheduling.plain.requests import PlainRequests

__all__ = ["PlainRequests"]
