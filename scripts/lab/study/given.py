"""What the parts of the study have in common: a model, a profile, some problems."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.batch import InputLine, prompt_or_reason, read_lines
from common.config import InputConfig, RunConfig, find_config, load_profile, load_run
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError
from common.generate import Generator, build_generator


def parser(description: str, *, add_help: bool = True) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=add_help
    )
    made.add_argument("--profile", default="cpu")
    made.add_argument("--run", default="demo")
    made.add_argument("--problems", type=int, default=20)
    made.add_argument("--requests", type=int, default=4, help="at once")
    made.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="of the run")
    made.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    return made


def load(options: argparse.Namespace) -> Generator:
    changes = [f"max_num_requests={options.requests}", *options.changes]
    run = load_run(find_config("runs", options.run), changes)
    return build_generator(load_profile(find_config("profiles", options.profile)), run)


def problems(run: RunConfig, count: int) -> list[InputLine]:
    """The first lines of the run's input. Raises ConfigError."""
    return read_lines(_input(run).model_copy(update={"limit": count}))


def requests(generator: Generator, given: list[InputLine], seeds: Iterable[int]) -> list[GenerationRequest]:
    """Every problem under every seed; its id is `problem/seed`. Raises ConfigError for a line without a prompt."""
    prompts = [_prompt(generator, line) for line in given]
    pairs = [(index, seed) for seed in seeds for index in range(len(prompts))]
    return [GenerationRequest(f"{index}/{seed}", prompts[index], seed=seed) for index, seed in pairs]


def _prompt(generator: Generator, line: InputLine) -> tuple[int, ...]:
    source = _input(generator.run)
    prompt = prompt_or_reason(line, source, generator.tokenizer)
    if isinstance(prompt, str):
        raise ConfigError(f"{source.path}: problem {line.id}: {prompt}")
    return prompt


def _input(run: RunConfig) -> InputConfig:
    if run.input is None:
        raise ConfigError("the run has no input.path: name a run with problems")
    return run.input


def decode(generator: Generator, settings: dict[str, Any], wanted: list[GenerationRequest]) -> dict[str, Completion]:
    """Completions by id, under the run's settings with these changes."""
    found: dict[str, Completion] = {}
    for result in generator.with_decode(generator.run.decode.changed(settings)).generate(wanted):
        if isinstance(result, Rejection):
            raise ConfigError(f"problem {result.id}: {result.reason}")
        found[result.id] = result
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
