"""Flags for the settings that people change most, each of which is `--set KEY=VALUE` by another name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Optional

import typer


class Shorthand(NamedTuple):
    """A flag and the setting that it writes; the value is read as that of `--set`."""

    flags: tuple[str, ...]
    key: str
    metavar: str
    help: str


DECODING = (
    Shorthand(
        ("--num-lookahead", "-k"), "decode.num_lookahead", "K", "Lookahead branches beside the anchor; 0 means none."
    ),
    Shorthand(("--max-tokens",), "decode.max_new_tokens", "N", "The most tokens of an answer."),
    Shorthand(
        ("--temperature",), "decode.temperature", "T", "0 takes the most probable tokens; above 0 tokens are drawn."
    ),
    Shorthand(("--block-size",), "decode.block_size", "N", "Positions that are opened and finished together."),
    Shorthand(
        ("--skip-threshold",), "decode.skip_threshold", "P", "Fill every position that is more probable than this."
    ),
    Shorthand(("--preset",), "preset", "NAME", "A family's published settings, from configs/presets."),
    Shorthand(("--seed",), "seed", "N", "The seed of drawn tokens."),
    Shorthand(("--dtype",), "dtype", "NAME", "float32, bfloat16 or float16."),
    Shorthand(("--max-model-len",), "max_model_len", "N", "The most tokens of a prompt and its answer together."),
)
AT_ONCE = Shorthand(
    ("--max-num-requests", "-n"), "max_num_requests", "N", "Requests that are decoded at the same time."
)
LIMIT = Shorthand(("--limit",), "input.limit", "N", "Decode the first N requests only.")
OUTPUT = Shorthand(
    ("--output", "-o"), "output.path", "FILE", "The file for the answers: JSONL, one line for each request."
)


def with_shorthands(command: Callable[..., None], *more: Shorthand) -> Callable[..., None]:
    """The command with these flags among its options. What they say goes before its own `set`, whose word is last."""
    name_of = {f"shorthand_{one.key.replace('.', '_')}": one for one in (*DECODING, *more)}

    def started(**given: Any) -> None:
        said = {one.key: given.pop(name) for name, one in name_of.items()}
        own = [f"{key}={value}" for key, value in said.items() if value is not None]
        command(**{**given, "set": [*own, *(given["set"] or [])]})

    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), *(_parameter(name, one) for name, one in name_of.items())]
    started.__name__, started.__doc__ = command.__name__, command.__doc__
    started.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    started.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return started


def _parameter(name: str, one: Shorthand) -> inspect.Parameter:
    help = f"{one.help} (--set {one.key})"
    option = typer.Option(*one.flags, metavar=one.metavar, help=help, rich_help_panel="Settings")
    kind: Any = Annotated[Optional[str], option]  # noqa: UP045  typer reads this at run time, on Python 3.10 too
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
