"""Requests whose formats are being compiled, beside others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from common.serving.http.service import Service


class Made(Exception):
    """The request's turn to be made has come."""


class Book:
    """Formats that take until `release`; but for `known`."""

    def __init__(self) -> None:
        self.release, self.prepared = threading.Event(), []  # type: ignore[var-annotated]

    def is_prepared(self, fields: Any) -> bool:
        return bool(fields.format == "known")

    def prepare(self, fields: Any) -> None:
        self.prepared.append(fields.format)
        self.release.wait()

    def orders(self, *_: Any) -> None:
        raise Made


def test_a_format_that_is_kept_waits_for_none_and_clients_that_leave_cost_nothing() -> None:
    service, book = Service.__new__(Service), Book()
    service._made = (None, book)  # type: ignore[assignment]
    service._compiling, service._compiler = asyncio.Lock(), ThreadPoolExecutor(1)

    def submitted(format: str) -> Any:
        fields: Any = SimpleNamespace(is_held=True, format=format)
        return service.submit("", fields, [()], None, "prefix")

    async def attack() -> None:
        hostile = [asyncio.create_task(submitted(f"hostile {number}")) for number in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(Made):
            await submitted("known")
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        book.release.set()
        with pytest.raises(Made):
            await submitted("new")

    asyncio.run(asyncio.wait_for(attack(), 60))
    assert book.prepared in (["hostile 0", "new"], ["new"])
