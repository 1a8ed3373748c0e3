"""A setting that names a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from common.policies import policy


@dataclass(frozen=True)
class Policy:
    """Of `common/policies/<folder>`, or of an installed package."""

    folder: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        policy(self.folder, name)
        return name
