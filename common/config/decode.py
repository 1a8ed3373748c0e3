"""How a request is decoded: the `decode` section of a run, and what a row of a sweep changes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from common.config.frozen import Frozen

Strategy = Literal["d2f", "fast_dllm", "vanilla"]
SamplingStrategy = Literal["default", "margin", "neg_entropy"]
WindowAttention = Literal["full", "block_causal"]
BranchScore = Literal["mean", "sliding_window", "random"]
SpawnRule = Literal["confident", "uncertain", "random"]
SpawnBlocks = Literal["all", "first"]

AUTO_LOOKAHEAD = -1  # num_lookahead: as many as pay on this device


class DecodeConfig(Frozen):
    """How a request is decoded. Names are those of D2F and LoPA; the paper's symbols stand behind them."""

    strategy: Strategy = "d2f"
    num_lookahead: int = Field(default=3, ge=-1)  # k: branches beside the anchor; `auto` is -1
    block_size: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)  # the canvas holds the whole blocks that fit
    block_add_threshold: float = Field(default=0.1, ge=0, le=1)  # tau_add
    decoded_token_threshold: float = Field(default=0.95, gt=0, le=1)  # tau_act
    skip_threshold: float = Field(default=0.9, gt=0, le=1)  # tau_conf
    sampling_strategy: SamplingStrategy = "neg_entropy"
    branch_score: BranchScore = "mean"
    spawn_rule: SpawnRule = "confident"
    spawn_blocks: SpawnBlocks = "all"  # lookaheads from every active block, or from the first that holds masks
    bottom_share: float = Field(default=1.0, gt=0, le=1)
    creation_weight: float = Field(default=0.0, ge=0, le=1)
    window_attention: WindowAttention = "full"
    shift_row: Literal["stale", "fresh"] = "stale"
    cache: Literal["prefix", "dual"] = "prefix"
    reuse_prefix: bool = False  # keep the KV of a prompt's start from an earlier prompt with the same: approximate
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    stop_at_eos: bool = True
    stop: tuple[str, ...] = ()
    max_steps: int | None = Field(default=None, ge=1)
    eos_token_id: int | None = None  # None: the checkpoint's own
    mask_token_id: int | None = None  # None: the checkpoint's own

    @field_validator("num_lookahead", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and value < 0:
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
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None):
            raise ValueError("top_p and top_k only act with temperature > 0: set temperature or remove them")
        return self
