"""A request's settings and what follows from them. Requests of equal settings share one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from common.compiled import Records
from common.config import BlockDiffusion, DecodeConfig, FastDllm, Levenshtein
from common.policies import rule_of
from common.policies.branch_scores import EXACT, RANDOM, SUBSET
from common.policies.rule import PLUG_IN, enter
from common.policies.settings import settings_of
from common.policies.spawn_rules import DRAWN

NO_TOKEN = -1  # what an anchor adds, too
_REMEMBERED_STEPS = 1 << 17  # of a request that revises blocks; of a longer canvas so many as are usual


class StopSearch(Protocol):
    """Searches a request's tokens for its stop strings while they become final.

    num_seen: generated ids that it has searched.
    """

    num_seen: int

    def find(self, more_ids: Sequence[int], is_over: bool) -> int | None:
        """Search the ids after the seen ones. Returns how many ids of all to keep; None if no stop string was found.
        is_over: these are the last."""


FindStop = Callable[[], StopSearch]  # for a request that begins
StopFinder = Callable[[DecodeConfig], "FindStop | None"]  # None: of settings without stop strings


def no_stop_strings(decode: DecodeConfig) -> FindStop | None:
    """The StopFinder of a scheduler that has no tokenizer."""
    if decode.stop:
        raise ValueError(f"stop strings {list(decode.stop)} need a tokenizer: give the scheduler a stop_finder")
    return None


class ModelFacts(NamedTuple):
    """What the scheduler needs to know of a model; names as in `common.checkpoint.ModelConfig`.

    shift: 1: a position's token is predicted by the entry before it; 0: by its own. more_end_token_ids: end a text too,
    unless a request's settings name an end token. edit_ids: tokens that delete, and that insert.
    """

    shift: int = 1
    more_end_token_ids: tuple[int, ...] = ()
    edit_ids: tuple[int, int] | None = None


DREAM = ModelFacts()


# Setting that names a policy -> its kind, and what the loops call it.
POLICIES = {
    "branch_score": "branch_scores", "fill_rule": "fill_rules", "spawn_rule": "spawn_rules",
    "lookahead_rule": "lookahead_rules",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rules:
    """The settings of a request, prepared for the loops.

    eos_token_id: the settings' own, or the model's; None (-1 in settings): nothing ends a text.

    chunk: positions of a prompt that one pass takes, whole blocks: a longer prompt takes several passes. None: any
    number, where a prompt's positions see each other, so that it cannot be cut.
    edit_ids: tokens that delete and that insert, where the strategy revises blocks.
    ways: rules among which the load chooses; these are those of the first.
    """

    decode: DecodeConfig
    eos_token_id: int | None
    find_stop: FindStop | None
    sampling: tuple[float, float, float]  # in the order of plan.SamplingField
    shift: int = 1
    end_token_ids: frozenset[int] = frozenset()
    chunk: int | None = None
    edit_ids: tuple[int, int] | None = None
    ways: tuple[Rules, ...] = ()

    @classmethod
    def of(
        cls,
        decode: DecodeConfig,
        eos_token_id: int | None,
        stop_finder: StopFinder,
        facts: ModelFacts = DREAM,
        max_num_batched_tokens: int | None = None,
    ) -> Rules:
        own = eos_token_id if decode.eos_token_id is None else decode.eos_token_id
        more = facts.more_end_token_ids if decode.eos_token_id is None else ()
        sampling = decode.temperature, decode.top_p, float(decode.top_k or 0)
        stop = stop_finder(decode)
        own = None if own == NO_TOKEN else own
        ends = frozenset((() if own is None else (own, *more)) + decode.stop_token_ids)
        chunk = None
        if max_num_batched_tokens is not None and decode.strategy.is_from_zero and decode.strategy.cached != "none":
            chunk = max(1, max_num_batched_tokens // decode.block_size) * decode.block_size
        return cls(decode, own, stop, sampling, facts.shift, ends, chunk, _edit_ids(decode, facts))

    def num_first(self, prompt_length: int) -> int:
        """Return the prompt tokens of a request's first pass."""
        return prompt_length if self.chunk is None else min(self.chunk, prompt_length)

    @cached_property  # this and what else is cached are asked at every step
    def is_sampled(self) -> bool:
        return self.decode.temperature > 0

    @cached_property
    def record(self) -> Records:
        """[1] SETTINGS: what the loops read."""
        made_1 = settings_of(self.decode)
        for setting, kind in POLICIES.items():
            enter(made_1[0], setting, *rule_of(kind, getattr(self.decode, setting)))
        return made_1

    @cached_property
    def has_plug_ins(self) -> bool:
        """Whether policies of other packages decide something."""
        return any(self.record[0][setting] == PLUG_IN for setting in POLICIES)

    @cached_property
    def has_own_score(self) -> bool:
        """Whether a policy of another package scores branches."""
        return bool(self.record[0]["branch_score"] == PLUG_IN)

    @cached_property
    def verifies_drafts(self) -> bool:
        """Whether the winner is what `drafts.hold` finds."""
        return bool(self.record[0]["branch_score"] in (EXACT, SUBSET))

    @cached_property
    def draws(self) -> bool:
        """Whether a rule looks at random numbers."""
        own = self.record[0]
        return bool(own["branch_score"] == RANDOM or own["spawn_rule"] in DRAWN)

    @property
    def block_size(self) -> int:
        """Positions of a block, of `vanilla` the whole canvas."""
        return self.decode.max_new_tokens if self.decode.strategy.name == "vanilla" else self.decode.block_size

    @property
    def max_blocks(self) -> int:
        """Blocks of a whole canvas."""
        return self.decode.max_new_tokens // self.block_size

    @property
    def most_steps(self) -> int:
        """More steps than any request needs."""
        decode = self.decode
        most = 2 * decode.max_new_tokens + 16
        strategy, edits = decode.strategy, 0
        if isinstance(strategy, BlockDiffusion) and strategy.edit_threshold is not None:
            edits = strategy.max_post_edit_steps + 2
        if strategy.is_from_zero:
            most += (decode.max_new_tokens // decode.block_size + 2) * (decode.block_size + edits)
        if isinstance(strategy, Levenshtein):
            num_blocks = decode.max_new_tokens // decode.block_size + 2
            usual = 4 * (decode.block_size + strategy.steps + strategy.max_post_edit_steps)
            block_steps = min(self.most_block_steps, max(usual, _REMEMBERED_STEPS // num_blocks))
            return 1 + num_blocks * block_steps  # one that writes the prompt's KV
        if isinstance(strategy, FastDllm):
            most += self.max_blocks * strategy.min_block_steps
        return most

    @property
    def most_block_steps(self) -> int:
        """Passes that revise a block, one more included that writes its KV."""
        decode, strategy = self.decode, self.decode.strategy
        if not isinstance(strategy, Levenshtein):
            return 0
        return strategy.most_block_steps or decode.block_size + strategy.max_post_edit_steps + 2

    @property
    def num_remembered(self) -> int:
        """Numbers that revising a block has to remember."""
        strategy = self.decode.strategy
        is_by_position = isinstance(strategy, Levenshtein) and strategy.most_block_steps is None
        return self.most_block_steps * (self.decode.block_size if is_by_position else 1)

    @cached_property
    def survival_margin(self) -> int | None:
        """Tokens that a canvas keeps beyond the expected length; None: it is not cut."""
        strategy = self.decode.strategy
        return strategy.survival_margin if isinstance(strategy, FastDllm) and self.end_token_ids else None

    @property
    def max_steps(self) -> int:
        """Steps after which the request ends in any case."""
        return self.most_steps if self.decode.max_steps is None else min(self.decode.max_steps, self.most_steps)


def _edit_ids(decode: DecodeConfig, facts: ModelFacts) -> tuple[int, int] | None:
    """Return the settings' own, or the model's. Raises ValueError where a strategy needs them and there are none."""
    strategy = decode.strategy
    if not isinstance(strategy, Levenshtein):
        return None
    if strategy.delete_token_id is not None and strategy.split_token_id is not None:
        return strategy.delete_token_id, strategy.split_token_id
    if facts.edit_ids is None:
        raise ValueError(
            "strategy levenshtein needs tokens that delete and insert, and the checkpoint's config.json names none: "
            "set strategy to block_diffusion, or its delete_token_id and split_token_id"
        )
    return facts.edit_ids
