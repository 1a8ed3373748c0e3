"""How `--help` looks: flags without a type beside them, arguments without braces, and `lopa help COMMAND`."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from common.errors import ConfigError, did_you_mean


class PlainCommand(TyperCommand):
    """A command of `lopa`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _reflowed(self.help or "")

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class PlainGroup(TyperGroup):
    """`lopa` itself."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


def _reflowed(text: str) -> str:
    """Return a docstring's paragraphs as a line each: typer keeps the line breaks of all but the first."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _without_types(params: Any) -> Any:
    """Some versions of typer write `--overwrite <bool>`, as if a value were wanted."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def help(
    context: typer.Context,
    command: Annotated[
        Optional[str],  # noqa: UP045  typer reads this at run time, on Python 3.10 too
        typer.Argument(metavar="COMMAND", help="The one to explain; all of them if not given."),
    ] = None,
) -> None:
    """Explain a command, as its --help does."""
    parent: Any = context.parent
    if command is None:
        typer.echo(parent.get_help())
        return
    found = parent.command.get_command(parent, command)
    if found is None:
        hint = did_you_mean(command, parent.command.list_commands(parent))
        raise ConfigError(f"help {command}: there is no such command; {hint}`lopa help` lists them")
    found.main(["--help"], prog_name=f"lopa {command}")
