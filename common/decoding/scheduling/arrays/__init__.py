"""All requests at once, as arrays. `requests` is where to begin."""

from common.decoding.scheduling.arrays.requests import RequestArrays

__all__ = ["RequestArrays"]
