from __future__ import annotations

from tests.unit.batch.conftest import run

__all__ = ["run"]
