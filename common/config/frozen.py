"""What every object of settings is: complete, checked and read-only."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

_NUMBERS = (int, float)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("set it to a number, not to true or false")
    return value


Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1)]


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Settings(Frozen):
    """What is read from YAML. A trace is not: its JSON is read strictly, where a validator in front would get in."""

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
