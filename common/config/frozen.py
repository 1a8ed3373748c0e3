"""What every object of settings is: complete, checked and read-only; and a setting that names a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from common.policies import check

_NUMBERS = (int, float)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("set it to a number, not to true or false")
    return value


Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1)]


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Settings(Frozen):
    """Settings read from YAML. A trace is not: its JSON is read strictly, where a validator in front would get in."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1. YAML's users do not."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = getattr(annotation, "__args__", (annotation,))
            if bool not in kinds and any(number in kinds for number in _NUMBERS):
                return _no_boolean(value)
        return value

    @field_validator("*")
    @classmethod
    def _fits_a_tensor(cls, value: Any) -> Any:
        """An integer beyond 64 bits is a typing error, and fails wherever it meets a tensor."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("set it to less than 2^63")
        return value


def refusing_old(why_old: Callable[[Mapping[str, Any]], str | None]) -> Any:
    """Return a validator that refuses keys of earlier versions. why_old: says how the first of them is written now."""

    def check(cls: type[BaseModel], value: Any) -> Any:
        problem = why_old(value) if isinstance(value, Mapping) else None
        if problem is not None:
            raise ValueError(problem)
        return value

    validator: Any = classmethod(check)
    return model_validator(mode="before")(validator)


@dataclass(frozen=True)
class Policy:
    """Names a policy of `common/policies/<folder>`, or of an installed package."""

    folder: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        check(self.folder, name)
        return name
