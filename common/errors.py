"""What can go wrong, by whose turn it is: a setting to correct, hardware that failed, hardware that is not there."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is wrong; the message names the file, the key and the fix, in one line whatever they are called."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class EngineError(RuntimeError):
    """The hardware side failed; the message names rank, step and what to do."""


class MissingCapability(EngineError):
    """This machine or build cannot do what the profile asks; the message says what to change."""


LOST_PEER = "a peer is gone or stuck"  # in messages that follow from another process's end


def first_line(error: BaseException) -> str:
    """What an error says, in a line; an error without text by its name."""
    return (str(error).strip() or repr(error)).splitlines()[0]
