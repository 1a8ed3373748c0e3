"""API keys: where they come from, and whether a client has one."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from common.errors import ConfigError, first_line

KEYS_VARIABLE = "LOPA_API_KEYS"
_MOST_BYTES = 2**20


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Return digests of the keys of a file, one a line, and of the environment, with commas between; none: nobody needs
    one. Lines of the file that begin with # are comments.

    Raises ConfigError for a file that cannot be read, for a file or a variable that holds no key, and for a key that
    clients send differently.
    """
    given = os.environ.get(KEYS_VARIABLE)
    keys = [key.strip() for key in (given or "").split(",")]
    if given is not None and not any(keys):
        raise ConfigError(f"{KEYS_VARIABLE} is set and holds no key: give it keys with commas between, or unset it")
    if path is not None:
        try:
            with Path(path).open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ValueError("it is longer than a MiB")
            own = content.decode("utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: the API keys cannot be read ({first_line(error)}); name a text file") from None
        own = [line.strip() for line in own if not line.lstrip().startswith("#")]
        if not any(own):
            raise ConfigError(f"{path}: holds no API key; write one a line, or remove api_key_file")
        keys += own
    if not all(key.isascii() and key.isprintable() for key in keys):
        where = KEYS_VARIABLE if path is None else f"{path} or {KEYS_VARIABLE}"
        raise ConfigError(
            f"an API key of {where} is not plain ASCII, which clients send in different ways: make another"
        )
    return tuple(_digest(key) for key in dict.fromkeys(keys) if key)


def is_known(header: str | None, digests: tuple[bytes, ...]) -> bool:
    """Whether `Authorization: Bearer KEY` names one of them; takes as long whichever it is."""
    scheme, _, key = (header or "").partition(" ")
    digest = _digest(key.strip())
    found = [hmac.compare_digest(digest, known) for known in digests]
    return any(found) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
