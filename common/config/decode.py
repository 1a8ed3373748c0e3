"""How a request is decoded: the `decode` section of a run, and what a row of a sweep changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from common.config.consistent import BLOCKS_FROM_ZERO, MIN_TEMPERATURE, contradictions
from common.config.frozen import Settings
from common.config.policy import Policy

Strategy = Literal["d2f", "multi_block", "fast_dllm", "vanilla", "block_diffusion", "fast_dllm_v2"]
WindowAttention = Literal["full", "block_causal"]
SpawnBlocks = Literal["all", "first"]

NUM_CANDIDATES = 256  # the most tokens of a position that top_p and top_k can leave
MOST_STOP_TOKENS = 128
_MOST_STOP_LETTERS = 1000  # of a stop string
AUTO_LOOKAHEAD = -1  # num_lookahead: as many as pay on this device
MOST = 10**6  # of numbers whose effect ends long before; above 3e38 they would be infinite in float32
MOST_BLOCK_STEPS = 1000  # that a block may cost beside those that fill it: more would be an endless loop
MOST_GUIDANCE = 1000  # logits times it still tell tokens apart in float32
_PART = object()  # context of a validation: these settings are a part, whose sense depends on the others


class DecodeConfig(Settings):
    """How a request is decoded. Names are those of D2F and LoPA; descriptions give the paper's symbols."""

    strategy: Strategy = Field(
        default="d2f",
        description="The rule under the lookahead branches: `d2f` pipelines blocks, `multi_block` (d3LLM) does over a "
        "whole canvas, `fast_dllm` fills one block after another, `vanilla` fills the whole canvas and caches nothing, "
        "`block_diffusion` (SDAR, TraDo, LLaDA2) and `fast_dllm_v2` are those of models whose blocks are counted from "
        "position 0.",
    )
    num_lookahead: int = Field(
        default=3,
        ge=-1,
        le=1000,
        description="k, the lookahead branches beside the anchor; 0 is the plain strategy, `auto` measures how many "
        "pay on this device (`lopa_cuda`).",
    )
    block_size: int = Field(default=32, ge=1, description="Positions of a block.")
    max_new_tokens: int = Field(
        default=256,
        ge=1,
        description="Positions that a request may fill; its canvas holds the whole blocks that fit into them.",
    )
    block_add_threshold: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="tau_add: the next block opens once this share of the last one is filled (`d2f`, "
        "`multi_block`; with `block_diffusion` 1 unless it is set).",
    )
    decoded_token_threshold: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="tau_act: a block has to fill at least one position a step once this share of its predecessor is "
        "filled.",
    )
    skip_threshold: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="tau_conf: every mask whose token is more probable than this is filled.",
    )
    fill_rule: Annotated[str, Policy("fill_rules")] = Field(
        default="threshold",
        description="Which masks of a block a step fills: those above `skip_threshold` (`threshold`); as many as "
        "`denoising_steps` asks for, the most confident (`static`), the first (`sequential`), or all above "
        "`skip_threshold` if those are more (`dynamic`); those of the lowest entropies up to `entropy_bound` "
        "(`entropy_bounded`); by `factor`; or all below `entropy_threshold` (`entropy`); at least one in any case.",
    )
    denoising_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps in which `static`, `sequential` and `dynamic` fill a whole block, so many positions a step; "
        "`null` is one position a step.",
    )
    entropy_bound: float = Field(
        default=0.35,
        gt=0,
        le=MOST,
        description="What the sum of the entropies (natural logarithm) of the positions that one step fills stays "
        "below (`fill_rule: entropy_bounded`).",
    )
    entropy_threshold: float = Field(
        default=0.5,
        gt=0,
        le=MOST,
        description="The entropy (natural logarithm) below which `fill_rule: entropy` fills a position.",
    )
    factor: float = Field(
        default=1.0,
        gt=0,
        le=MOST,
        description="`fill_rule: factor` fills the n most probable masks, n the most for which (n + 1)(1 - p) stays "
        "below this for all of them.",
    )
    sampling_strategy: Annotated[str, Policy("token_confidences")] = Field(
        default="neg_entropy",
        description="Token confidence, which ranks masks and branches: the highest probability (`default`), its lead "
        "over the second (`margin`), the negative entropy (`neg_entropy`), or a policy that the head's kernels lack "
        "(slower, `lopa_cuda`).",
    )
    branch_score: Annotated[str, Policy("branch_scores")] = Field(
        default="mean",
        description="Branch confidence C(B): the mean over the remaining masks (`mean`), over the weakest run of a "
        "block's length (`sliding_window`), or chance, as a control (`random`).",
    )
    spawn_rule: Annotated[str, Policy("spawn_rules")] = Field(
        default="confident",
        description="Which masks the lookaheads fill: the most confident, or as controls the most uncertain or random "
        "ones.",
    )
    lookahead_rule: Annotated[str, Policy("lookahead_rules")] = Field(
        default="all",
        description="How many of the `num_lookahead` lookaheads a step tries: `all`, as published, or fewer by "
        "what the step before it did.",
    )
    spawn_blocks: SpawnBlocks = Field(
        default="all",
        description="Where lookaheads may go: into `all` active blocks, as published, or into the `first` that holds "
        "masks, which suits `window_attention: block_causal`.",
    )
    bottom_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="The share of the remaining masks, the least confident ones, that `branch_score: mean` counts.",
    )
    creation_weight: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The weight, in a branch's score, of the confidence that its lookahead token had when it was "
        "spawned.",
    )
    window_attention: WindowAttention = Field(
        default="full",
        description="What a position of the window sees: all of the window (`full`), or nothing behind its own block "
        "(`block_causal`, the only kind of `lopa_ascend`).",
    )
    shift_row: Literal["stale", "fresh"] = Field(
        default="stale",
        description="What predicts the first token behind the cache: the step that committed the position before it "
        "(`stale`, as published), or, as for every block's first token, what the window holds (`fresh`).",
    )
    cache: Literal["prefix", "dual", "none"] = Field(
        default="prefix",
        description="What is cached: the KV in front of the current block (`prefix`); behind it too, with "
        "`fast_dllm_v2` that of its other sub-blocks (`dual`: `fast_dllm`, `fast_dllm_v2`); or nothing (`none`: "
        "`fast_dllm`, `block_diffusion`).",
    )
    commit: Literal["fused", "separate"] = Field(
        default="fused",
        description="How a finished block's KV becomes final (`block_diffusion`): in the next block's first pass "
        "(`fused`), or as published, in a pass of its own, the last block's too (`separate`); without lookahead and "
        "temperature the tokens are the same. `fast_dllm_v2` always has that pass, which gives it a token.",
    )
    cache_delay: int = Field(
        default=0,
        ge=0,
        description="Passes that a finished block waits before its KV is kept (`multi_block`); meanwhile passes "
        "forward everything and renew what is cached.",
    )
    sub_block_size: int | None = Field(
        default=None,
        ge=1,
        description="`fast_dllm_v2` fills a block in pieces of so many positions, from left to right; `null` is the "
        "whole block.",
    )
    edit_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Replace a filled token once another one is more probable than this, until nothing changes any "
        "more (`block_diffusion`, LLaDA2.1); 0 replaces whenever another one is the most probable, `null` never.",
    )
    max_post_edit_steps: int = Field(
        default=16,
        ge=0,
        le=MOST_BLOCK_STEPS,
        description="The most steps that a block is edited in once it has no mask.",
    )
    penalty_lambda: float = Field(
        default=0.0,
        ge=0,
        le=MOST,
        description="What the logit of the token in front of a position is lowered by at that position "
        "(`edit_threshold`, within a block).",
    )
    cfg_scale: float = Field(
        default=0.0,
        ge=0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance: logits are u + (cfg_scale + 1)(l - u), u those of a row whose prompt is "
        "masked (`fast_dllm` with `cache: none`).",
    )
    min_block_steps: int = Field(
        default=1,
        ge=1,
        le=MOST_BLOCK_STEPS,
        description="The least steps that `fast_dllm` spends on a block, filled or not.",
    )
    max_block_steps: int | None = Field(
        default=None,
        ge=1,
        description="The most steps that `fast_dllm` spends on a block; masks that are left are filled by the first "
        "step of a later block, or never. `null` is no limit.",
    )
    reuse_prefix: bool = Field(
        default=False,
        description="Keep the KV of whole blocks that a prompt shares with an earlier one, which is approximate and "
        "depends on the order of requests (`lopa_cuda` with `d2f`).",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="0 takes the most probable token; above 0 tokens are drawn, by noise that does not depend on the "
        f"number of processes; less than {MIN_TEMPERATURE} is 0.",
    )
    temperature_acts_on: Literal["draw", "draw_and_confidence"] = Field(
        default="draw",
        description="What temperature, top_p and top_k change: which token is drawn (`draw`), so that thresholds mean "
        "the same at every temperature, or its probability and the confidence too (`draw_and_confidence`), as some "
        "published code has it (docs/families.md), so that at low temperatures nearly every token passes a threshold.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Above temperature 0: draw from the most probable tokens that together reach this probability, and "
        f"from no more than {NUM_CANDIDATES} of them (with their ties).",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        le=NUM_CANDIDATES,
        description="Above temperature 0: draw from this many of the most probable tokens (with their ties).",
    )
    stop_at_eos: bool = Field(
        default=True,
        description="End a request at its first end token; without it the blocks that are open are filled first.",
    )
    end_at: Literal["token", "block"] = Field(
        default="token",
        description="A request ends once no mask is left in front of its end token (`token`), or once its block is "
        "finished (`block`, as most published code; `block_diffusion` and `fast_dllm_v2`).",
    )
    stop: tuple[str, ...] = Field(
        default=(),
        description="An answer ends in front of the first of these texts; a special token's text stops it also where "
        "special tokens are not shown.",
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(),
        max_length=MOST_STOP_TOKENS,
        description="Tokens that end an answer as the end token does, and that its text does not show.",
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of texts, of what stop strings are looked for in, too."
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="The most steps of a request; `null` is more than any needs, of `d2f` 2 x max_new_tokens + 16.",
    )
    eos_token_id: int | None = Field(default=None, description="The end token; `null` is the checkpoint's own.")
    mask_probability: Literal["excluded", "counted"] = Field(
        default="excluded",
        description="Whether the mask token, which is never filled in, has a part in the probabilities of the others "
        "(`counted`, as in most published code, slower and on `lopa_cuda` only); trained models give it next to none.",
    )
    mask_token_id: int | None = Field(
        default=None, description="The token of an unfilled position; `null` is the checkpoint's own."
    )

    def changed(self, changes: Mapping[str, Any]) -> DecodeConfig:
        """These settings with others in the place of some. Raises pydantic's ValidationError.

        top_p and top_k, which act above temperature 0 only, go with a temperature that is changed to it.
        """
        greedy = {"top_p": 1.0, "top_k": None} if is_greedy(changes.get("temperature")) else {}
        wanted = {**greedy, **changes}
        part = DecodeConfig.model_validate(wanted, context=_PART)  # a server does this for each of its requests
        made = self.model_copy(update={name: getattr(part, name) for name in part.model_fields_set})
        if next(contradictions(made), None) is None:
            return made
        return DecodeConfig.model_validate({**self.model_dump(), **wanted})  # says which, as of a file

    @field_validator("num_lookahead", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        number = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else value
        if isinstance(number, (int, float)) and number < 0:
            raise ValueError("set it to 0 or more, or to auto")
        return AUTO_LOOKAHEAD if value == "auto" else value

    @field_validator("temperature")
    @classmethod
    def _is_0_or_tells_logits_apart(cls, value: float) -> float:
        return 0.0 if is_greedy(value) else value

    @field_serializer("num_lookahead")
    def _auto_by_name(self, value: int) -> int | str:
        return "auto" if value == AUTO_LOOKAHEAD else value

    @field_validator("sampling_strategy", mode="before")
    @classmethod
    def _ranks_tokens(cls, value: Any) -> Any:
        if value in (None, "none", False):
            raise ValueError(
                "fills and lookahead branches are ranked by token confidence: set it to default, margin or neg_entropy"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _stops_somewhere(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string stops before the first token: remove it")
        if any(len(text) > _MOST_STOP_LETTERS for text in value):
            raise ValueError(f"a stop string has at most {_MOST_STOP_LETTERS} characters: shorten it")
        if any("\ud800" <= letter <= "\udfff" for text in value for letter in text):
            raise ValueError("half a surrogate pair is no text: correct it")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _are_numbers(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(type(item) is not int or not 0 <= item < 2**31 for item in value):
            raise ValueError("token ids are whole numbers from 0 on: correct them")
        return value

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> DecodeConfig:
        if info.context is _PART:
            return self
        self._take_defaults_of_strategy()
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    def _take_defaults_of_strategy(self) -> None:
        if self.strategy in BLOCKS_FROM_ZERO:
            own = {"block_add_threshold": 1.0, "window_attention": "block_causal"}
            self.__dict__.update({name: value for name, value in own.items() if name not in self.model_fields_set})


def is_greedy(temperature: Any) -> bool:
    """Whether this temperature, as somebody wrote it, takes the most probable token."""
    try:
        return float(temperature) < MIN_TEMPERATURE
    except (TypeError, ValueError, OverflowError):  # refused where it is checked
        return False
