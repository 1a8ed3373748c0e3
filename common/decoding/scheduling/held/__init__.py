"""Answers that are held to a format, between a pass and the loops."""

from common.decoding.scheduling.held.answer import Held, Pass, Scratch

__all__ = ["Held", "Pass", "Scratch"]
