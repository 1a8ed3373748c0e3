"""`lopa tune`: measure tiles for a model's linears. It reads its own arguments, since `--tokens` takes a list."""

from __future__ import annotations

import argparse

import typer

from common.commands.arguments.found import load_both
from common.commands.arguments.options import Parser, WholeNumber, add_model_and_settings
from common.platforms import TuneOptions, platform_of
from common.processes import apply_environment, inform

# Numbers of tokens of one row's windows of whole blocks, then of several rows and prompts.
USUAL_TOKENS = (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 1536, 2048)
_MOST_TOKENS = 32768


def tune(context: typer.Context) -> None:
    """Measure which tiles this model's linears run fastest with on this GPU, for the engine's next start."""
    known = parse(context.args)
    profile, run = load_both(known.profile, known.model, known.set)
    apply_environment(profile.environment)
    options = TuneOptions(tuple(sorted(set(known.tokens))), known.output, known.overwrite)
    for line in platform_of(profile).tune(profile, run, options):
        inform(line)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a usage message where they are wrong."""
    parser = Parser(prog="lopa tune", description=tune.__doc__)
    add_model_and_settings(parser)
    parser.add_argument(
        "--tokens", nargs="+", type=WholeNumber(_MOST_TOKENS), default=list(USUAL_TOKENS), metavar="N",
        help=f"numbers of tokens to measure for, each also for those below it; {' '.join(map(str, USUAL_TOKENS))} if "
        "not given",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write here, not where engines read this user's tiles")
    parser.add_argument("--overwrite", action="store_true", help="measure again what the file has")
    return parser.parse_args(arguments)
