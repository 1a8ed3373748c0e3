"""What the model is called, and what is told to whoever calls it otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.config import RunConfig
from common.hub import name_of
from common.serving.http.errors import ApiError


def model_names(run: RunConfig) -> tuple[str, ...]:
    """The run's names for it, else that of its folder, or OWNER/NAME of a hub's repository."""
    of_hub = name_of(run.model)
    return run.serve.served_model_names or (Path(run.model).resolve().name if of_hub is None else of_hub.repository,)


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise ApiError for a model that is not this one."""
    if name is not None and name not in names:
        raise ApiError(404, f"the model {name!r:.200} is not served here, only {', '.join(names)}", "model")
