"""How a request is decoded: the `decode` section of a run, and what a row of a sweep changes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from common.config.frozen import Settings

Strategy = Literal["d2f", "fast_dllm", "vanilla"]
SamplingStrategy = Literal["default", "margin", "neg_entropy"]
WindowAttention = Literal["full", "block_causal"]
BranchScore = Literal["mean", "sliding_window", "random"]
SpawnRule = Literal["confident", "uncertain", "random"]
SpawnBlocks = Literal["all", "first"]

NUM_CANDIDATES = 256  # the most tokens of a position that top_p and top_k can leave
AUTO_LOOKAHEAD = -1  # num_lookahead: as many as pay on this device


class DecodeConfig(Settings):
    """How a request is decoded. Names are those of D2F and LoPA; descriptions give the paper's symbols."""

    strategy: Strategy = Field(
        default="d2f",
        description="The rule under the lookahead branches: `d2f` pipelines blocks, `fast_dllm` fills one block after "
        "another, `vanilla` fills the whole canvas and caches nothing.",
    )
    num_lookahead: int = Field(
        default=3,
        ge=-1,
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
        description="tau_add: the next block opens once this share of the last one is filled (`d2f`).",
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
    sampling_strategy: SamplingStrategy = Field(
        default="neg_entropy",
        description="Token confidence, which ranks masks and branches: the highest probability (`default`), its lead "
        "over the second (`margin`), or the negative entropy (`neg_entropy`).",
    )
    branch_score: BranchScore = Field(
        default="mean",
        description="Branch confidence C(B): the mean over the remaining masks (`mean`), over the weakest run of a "
        "block's length (`sliding_window`), or chance, as a control (`random`).",
    )
    spawn_rule: SpawnRule = Field(
        default="confident",
        description="Which masks the lookaheads fill: the most confident, or as controls the most uncertain or random "
        "ones.",
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
    cache: Literal["prefix", "dual"] = Field(
        default="prefix",
        description="What `strategy: fast_dllm` caches: the KV in front of the current block (`prefix`), or behind it "
        "too (`dual`).",
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
        "number of processes.",
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
    stop: tuple[str, ...] = Field(default=(), description="An answer ends with the first of these texts.")
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="The most steps of a request; `null` is 2 x max_new_tokens + 16, which is more than any needs.",
    )
    eos_token_id: int | None = Field(default=None, description="The end token; `null` is the checkpoint's own.")
    mask_token_id: int | None = Field(
        default=None, description="The token of an unfilled position; `null` is the checkpoint's own."
    )

    @field_validator("num_lookahead", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        number = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else value
        if isinstance(number, (int, float)) and number < 0:
            raise ValueError("set it to 0 or more, or to auto")
        return AUTO_LOOKAHEAD if value == "auto" else value

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
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DecodeConfig:
        if self.strategy != "vanilla" and self.block_size > self.max_new_tokens:
            raise ValueError(
                f"block_size {self.block_size} is larger than max_new_tokens {self.max_new_tokens}: "
                "no block would fit; lower block_size or raise max_new_tokens"
            )
        if self.strategy != "d2f" and self.window_attention == "block_causal":
            raise ValueError(f"strategy {self.strategy} attends to its whole canvas: set window_attention to full")
        if self.strategy != "d2f" and self.reuse_prefix:
            raise ValueError(f"strategy {self.strategy} forwards the prompt again and again: remove reuse_prefix")
        if self.strategy != "fast_dllm" and self.cache == "dual":
            raise ValueError(f"cache dual is the one of strategy fast_dllm, not of {self.strategy}: change one of them")
        if self.branch_score != "mean" and self.bottom_share < 1:
            raise ValueError(f"bottom_share only acts with branch_score mean, not {self.branch_score}: remove it")
        if self.mask_token_id is not None and self.mask_token_id == self.eos_token_id:
            raise ValueError(f"mask_token_id and eos_token_id are both {self.mask_token_id}: change one of them")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None):
            raise ValueError("top_p and top_k only act with temperature > 0: set temperature or remove them")
        return self
