"""What the benches of many requests at once share: what is asked for, the prompts, and what they leave."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from common.batch import prompt_or_reason, read_lines
from common.checkpoint import Tokenizer
from common.config import DecodeConfig, DeviceProfile, Pace, RunConfig, paced
from common.errors import ConfigError

LEAST_REQUESTS = 16


class Setting(NamedTuple):
    """One line of the result at each load. pace: by which the load decides (`common.config.paces`)."""

    name: str
    decode: DecodeConfig
    pace: Pace = "fixed"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """at_once: numbers of requests. lookahead: numbers of branches, or paces. settings: what is measured instead.
    num_prompts: where the run's own model answers; else there are as many as suit the load. port: of the server that is
    measured."""

    at_once: tuple[int, ...] = (1, 4, 16, 64)
    lookahead: tuple[str, ...] = ("0", "3", "7", "balanced")
    settings: tuple[Setting, ...] = ()
    num_prompts: int = 300
    port: int = 8123

    def settings_over(self, decode: DecodeConfig) -> tuple[Setting, ...]:
        """Return `settings`, or `decode` with each number of lookaheads."""
        return self.settings or tuple(
            Setting(name, decode.model_copy(update={"num_lookahead": int(name)}))
            if name.isdecimal()
            else Setting(name, paced(decode, cast(Pace, name)), cast(Pace, name))
            for name in self.lookahead
        )

    @property
    def most(self) -> int:
        return max(self.at_once)


class LoadResult(NamedTuple):
    """table: Markdown. content: what the JSON file holds."""

    table: str
    content: Any


def prompts_of(run: RunConfig, tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """The first requests of the run's input; over and over where there are fewer. Raises ConfigError."""
    if run.input is None:
        raise ConfigError("the run that answers names no input: set input.path to a JSONL file with its prompts")
    prompts = [prompt_or_reason(line, run.input, tokenizer) for line in read_lines(run.input)[:count]]
    readable = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if not readable:
        raise ConfigError(f"{run.input.path}: no line of it can be asked: {prompts[0] if prompts else 'it has none'}")
    return list(itertools.islice(itertools.cycle(readable), count))


def for_loads(run: RunConfig, most: int) -> RunConfig:
    return run.model_copy(update={"max_num_requests": most})


def waits_for(profile: DeviceProfile) -> Callable[[], None]:
    """Return what waits until the profile's device has done everything."""
    import torch

    return torch.cuda.synchronize if profile.device == "cuda" else lambda: None


def tell(*facts: object) -> None:
    """Print progress, beside the result."""
    print(*facts, file=sys.stderr, flush=True)
