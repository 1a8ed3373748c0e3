"""lm-eval's own command line, with `lopa` among its models.

lm-eval finds models in its own package only, so its command cannot know of ours: it is called with ours registered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, first_line
from common.evaluation.harness_model import HarnessModel

if TYPE_CHECKING:
    from common.generate import Generator

NAME = "lopa"
Build = Callable[[str | None, str, list[str]], "Generator"]  # profile, run, overrides


def drive(arguments: Sequence[str], build: Build) -> None:
    """Run lm-eval's command line. Raises ConfigError without lm-eval; lm-eval itself may end the process."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConfigError(f"lm-eval cannot be loaded ({error}): install it with pip install 'lopa[eval]'") from None
    register(build)
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    except FileNotFoundError as error:
        raise ConfigError(f"lm-eval: {error}; put it there, or correct data_files in the task's YAML file") from error
    except _errors_of("datasets.exceptions", "DatasetsError") as error:
        why = f" ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise ConfigError(f"lm-eval: the task's data: {first_line(error)}{why}; correct it") from error
    except _errors_of("jinja2", "TemplateError") as error:
        raise ConfigError(f"lm-eval: a template of the task: {first_line(error)}; correct it") from error
    except ValueError as error:  # what it says of its own command line and tasks
        raise ConfigError(f"lm-eval: {error}") from error


def _errors_of(module: str, name: str) -> tuple[type[BaseException], ...]:
    """Return the errors of a library that lm-eval brings along, none where it has not loaded that."""
    found = sys.modules.get(module)
    return () if found is None else (getattr(found, name),)


def register(build: Build) -> type[HarnessModel]:
    """Register `--model lopa`; `--model_args run=MODEL,profile=PROFILE` and any other setting as `key=value`."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    def __init__(self: HarnessModel, **arguments: Any) -> None:  # noqa: N807  of the class below
        HarnessModel.__init__(self, build(*settings_of(arguments)))

    def create(cls: type[HarnessModel], given: dict[str, Any], _: object = None) -> HarnessModel:
        twice = sorted(given.keys() & _OF_LM_EVAL)
        if twice:
            raise ConfigError(
                f"--model_args {twice[0]}: the profile says what runs the model, max_num_requests how many requests "
                f"are decoded at once: write these, and remove {twice[0]}"
            )
        return cls(**given)

    def create_from_text(cls: type[HarnessModel], given: str, _: object = None) -> HarnessModel:
        from lm_eval.utils import simple_parse_args_string

        return create(cls, simple_parse_args_string(given))

    makers = {"create_from_arg_obj": classmethod(create), "create_from_arg_string": classmethod(create_from_text)}
    # Not a class statement: without lm-eval its base class has no type that could be checked.
    model: type[HarnessModel] = type(LM)("LopaModel", (HarnessModel, LM), {"__init__": __init__, **makers})
    register_model(NAME)(model)
    return model


def settings_of(arguments: dict[str, Any]) -> tuple[str | None, str, list[str]]:
    """Profile if named, run and overrides. What lm-eval adds of its own is left out. Raises ConfigError."""
    ours = {name: value for name, value in arguments.items() if name not in _OF_LM_EVAL and value is not None}
    if "run" not in ours:
        raise ConfigError(
            "--model_args has no run: write --model_args run=MODEL, a model's folder, a run file, or a name from "
            "configs/runs; profile=PROFILE beside it names what runs it"
        )
    run, profile = str(ours.pop("run")), ours.pop("profile", None)
    return None if profile is None else str(profile), run, [f"{name}={_written(value)}" for name, value in ours.items()]


# Sizes and devices: here the run's max_num_requests and the profile say so.
_OF_LM_EVAL = {"batch_size", "max_batch_size", "device"}


def _written(value: object) -> str:
    """Write a value as YAML reads it; lm-eval has made numbers and truth values of what looked like them."""
    return value if isinstance(value, str) else json.dumps(value)
