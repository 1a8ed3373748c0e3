"""The strategies under the lookahead branches, a class each, with the settings that only this one looks at.

`strategy` in YAML is a name, or an object with the name and some of these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Discriminator, Field, Tag, ValidationError, model_serializer, model_validator

from common.config.frozen import Settings

Value = TypeVar("Value")

MOST = 10**6  # of numbers whose effect ends long before; above 3e38 they would be infinite in float32
MOST_BLOCK_STEPS = 1000  # that a block may cost beside those that fill it: more would be an endless loop
MOST_GUIDANCE = 1000  # logits times it still tell tokens apart in float32


class Strategy(Settings):
    """What may be asked of any strategy."""

    name: str

    is_from_zero: ClassVar[bool] = False  # blocks are counted from position 0, and attention is block-causal
    sees_whole_canvas: ClassVar[bool] = False  # also what stands after the blocks that are filled
    num_best: ClassVar[int] = 0  # of the most probable tokens of a position, that the rule looks at beside the best one

    @property
    def cached(self) -> str:
        """`cache`: prefix, dual or none."""
        return self._own("cache", "prefix")

    @property
    def guidance(self) -> float:
        """`cfg_scale`; 0: none."""
        return self._own("cfg_scale", 0.0)

    @property
    def penalty(self) -> float:
        """`penalty_lambda`; 0: none."""
        return self._own("penalty_lambda", 0.0)

    @property
    def reuses_prefix(self) -> bool:
        return self._own("reuse_prefix", False)

    def _own(self, key: str, without: Value) -> Value:
        """Return the value of a key that only some strategies have."""
        found: Value = getattr(self, key, without)
        return found

    def unusual(self) -> dict[str, Any]:
        """Return the keys whose value is not the default."""
        return {key: value for key, value in self if value != type(self).model_fields[key].default}

    @model_serializer
    def _short(self) -> str | dict[str, Any]:
        """The bare name where all else is as usual."""
        return dict(self) if self.unusual() else self.name


class D2F(Strategy):
    """D2F: blocks in a pipeline, the next one opened before the last one is full."""

    name: Literal["d2f"] = "d2f"
    reuse_prefix: bool = Field(
        default=False,
        description="With `enable_prefix_caching`: reuse KV of whole pages that an earlier prompt shares; "
        "approximate, and dependent on the order of requests.",
    )


class MultiBlock(Strategy):
    """d3LLM: a pipeline of blocks over a whole canvas."""

    sees_whole_canvas: ClassVar[bool] = True
    name: Literal["multi_block"] = "multi_block"
    cache_delay: int = Field(
        default=0,
        ge=0,
        le=MOST,
        description="Passes that a finished block waits before its KV is kept; meanwhile passes compute everything "
        "and renew the cache.",
    )


class FastDllm(Strategy):
    """Fast-dLLM, and LLaDA as published: one block after another of a whole canvas."""

    sees_whole_canvas: ClassVar[bool] = True
    name: Literal["fast_dllm"] = "fast_dllm"
    cache: Literal["prefix", "dual", "none"] = Field(
        default="prefix",
        description="What is cached: the KV before the current block (`prefix`), also after it (`dual`), or nothing "
        "(`none`).",
    )
    cfg_scale: float = Field(
        default=0.0,
        ge=0,
        le=MOST_GUIDANCE,
        description="Classifier-free guidance: logits are u + (cfg_scale + 1)(l - u), u those of a row whose prompt is "
        "masked (with `cache: none`).",
    )
    min_block_steps: int = Field(
        default=1, ge=1, le=MOST_BLOCK_STEPS, description="The least steps of a block, filled or not."
    )
    max_block_steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="The most steps of a block; a later block's first step fills the masks that are left, or "
        "nothing does. `null` is no limit.",
    )
    survival_margin: int | None = Field(
        default=None,
        ge=0,
        le=MOST,
        description="Cut the canvas after its first pass to the length that the end token's probabilities predict "
        "(arXiv 2608.26374) plus so many tokens, rounded up to a block (not with a format); `null` does not cut.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> FastDllm:
        if self.cfg_scale and self.cache != "none":
            raise ValueError(
                f"cfg_scale needs cache none, since its masked prompts have keys of their own; it is {self.cache}"
            )
        if self.max_block_steps is not None and self.max_block_steps < self.min_block_steps:
            raise ValueError(
                f"max_block_steps {self.max_block_steps} is below min_block_steps {self.min_block_steps}: raise it"
            )
        return self


class Vanilla(Strategy):
    """The whole canvas as one block, nothing cached."""

    sees_whole_canvas: ClassVar[bool] = True
    name: Literal["vanilla"] = "vanilla"


class BlockDiffusion(Strategy):
    """SDAR, TraDo, LLaDA2: models whose blocks are counted from position 0."""

    name: Literal["block_diffusion"] = "block_diffusion"
    is_from_zero: ClassVar[bool] = True
    cache: Literal["prefix", "none"] = Field(
        default="prefix", description="What is cached: the KV before the current block (`prefix`), or nothing (`none`)."
    )
    commit: Literal["fused", "separate"] = Field(
        default="fused",
        description="How a finished block's KV becomes final: in the next block's first pass (`fused`), or in its "
        "own pass, as published (`separate`); without lookahead and temperature the tokens are the same.",
    )
    end_at: Literal["token", "block"] = Field(
        default="token",
        description="A request ends once no mask is left before its end token (`token`), or once its block is "
        "finished (`block`, as most published code).",
    )
    edit_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Replace a filled token once another is more probable than this, until nothing changes "
        "(LLaDA2.1); 0 replaces whenever another is the most probable, `null` never.",
    )
    max_post_edit_steps: int = Field(
        default=16, ge=0, le=MOST_BLOCK_STEPS, description="The most steps that edit a block without masks."
    )
    penalty_lambda: float = Field(
        default=0.0,
        ge=0,
        le=MOST,
        description="With `edit_threshold`: what the logit of the token before a position is lowered by at that "
        "position, within a block.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> BlockDiffusion:
        if self.penalty_lambda and self.edit_threshold is None:
            raise ValueError("penalty_lambda only acts with edit_threshold: set that, or remove penalty_lambda")
        return self


class Levenshtein(Strategy):
    """LLaDA2.2: block diffusion whose tokens are also replaced, deleted and inserted, until a block rests."""

    name: Literal["levenshtein"] = "levenshtein"
    is_from_zero: ClassVar[bool] = True
    num_best: ClassVar[int] = 8  # besides the mask and both edit tokens a few are left to choose among

    variant: Literal["checkpoint", "fluxserve", "sglang"] = Field(
        default="checkpoint", description="Whose published rule it is; docs/families.md has the differences."
    )
    edit_threshold: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Replace, delete or insert before a filled token once another is more probable than this.",
    )
    steps: int = Field(
        default=32,
        ge=1,
        le=MOST_BLOCK_STEPS,
        description="The most passes over which a block's first masks are filled; then each pass fills every mask "
        "(`sglang` instead fills at least one mask a pass).",
    )
    max_post_edit_steps: int = Field(
        default=16,
        ge=0,
        le=MOST_BLOCK_STEPS,
        description="Passes after the first masks are filled, of which the last fills all masks and neither deletes "
        "nor inserts; 0: the pass that fills the last first mask does so.",
    )
    max_block_steps: int = Field(
        default=1000,
        ge=2,
        le=MOST_BLOCK_STEPS,
        description="The most passes that revise a block (`sglang`: block_size + max_post_edit_steps + 1).",
    )
    delete_token_id: int | None = Field(
        default=None, ge=0, description="The token that deletes its position; `null` is the checkpoint's own."
    )
    split_token_id: int | None = Field(
        default=None, ge=0, description="The token that inserts a mask before a position; `null` as above."
    )

    @property
    def counts_mask(self) -> bool:
        """Whether the mask token may be predicted, and has a part in the probabilities."""
        return self.variant != "fluxserve"

    @property
    def commit(self) -> str:
        """How a finished block's KV becomes final, as in `block_diffusion`: `separate` where a pass of its own writes
        that of the prompt, and of a block whose last pass has changed it."""
        return "fused" if self.variant == "checkpoint" else "separate"

    @property
    def most_block_steps(self) -> int | None:
        """Passes of a block, one that writes its KV alone included; None: they follow from its size."""
        return None if self.variant == "sglang" else self.max_block_steps + 1

    @model_validator(mode="after")
    def _consistent(self) -> Levenshtein:
        if (self.delete_token_id is None) != (self.split_token_id is None):
            raise ValueError("delete_token_id and split_token_id are set together: set both, or neither")
        if self.delete_token_id is not None and self.delete_token_id == self.split_token_id:
            raise ValueError(f"delete_token_id and split_token_id are both {self.delete_token_id}: change one of them")
        return self


class FastDllmV2(Strategy):
    """Fast-dLLM v2: blocks counted from position 0, over a model that predicts a position from the one before it; the
    pass that makes a block's KV final gives the next one's first token."""

    name: Literal["fast_dllm_v2"] = "fast_dllm_v2"
    is_from_zero: ClassVar[bool] = True
    cache: Literal["prefix", "dual"] = Field(
        default="prefix",
        description="What is cached: the KV before the current block (`prefix`), or its other sub-blocks' too "
        "(`dual`).",
    )
    sub_block_size: int | None = Field(
        default=None,
        ge=1,
        description="Fill a block in pieces of so many positions, from left to right; `null` is the whole block.",
    )
    end_at: Literal["token", "block"] = Field(
        default="token", description="When a request ends, as in `block_diffusion`."
    )


# Whose canvas need not be of whole blocks.
TAKE_ANY_LENGTH = ("vanilla", "block_diffusion", "fast_dllm_v2", "levenshtein")


def _name_of(strategy: Any) -> Any:
    return strategy.get("name") if isinstance(strategy, Mapping) else strategy.name


AnyStrategy = Annotated[
    Annotated[D2F, Tag("d2f")]
    | Annotated[MultiBlock, Tag("multi_block")]
    | Annotated[FastDllm, Tag("fast_dllm")]
    | Annotated[Vanilla, Tag("vanilla")]
    | Annotated[BlockDiffusion, Tag("block_diffusion")]
    | Annotated[FastDllmV2, Tag("fast_dllm_v2")]
    | Annotated[Levenshtein, Tag("levenshtein")],
    Discriminator(_name_of),
]
STRATEGIES: dict[str, type[Strategy]] = {
    tag.tag: kind for kind, tag in map(get_args, get_args(get_args(AnyStrategy)[0]))
}


def keys_of_strategy(name: str) -> list[str]:
    """Return the settings that this strategy alone has, without its name."""
    return [key for key in STRATEGIES[name].model_fields if key != "name"]


def with_key(key: str) -> list[str]:
    """Return the names of the strategies that have this key."""
    return [name for name in STRATEGIES if key in keys_of_strategy(name)]


def as_section(strategy: Any) -> Any:
    """Return what may be written as a bare name as an object; anything else as it is, to be refused."""
    if isinstance(strategy, Strategy):
        strategy = strategy.model_dump()
    return {"name": strategy} if isinstance(strategy, str) else strategy


def merged(base: Any, change: Any) -> Any:
    """Return `strategy` as somebody changes it: keys of the same strategy stay, those of another one go with it."""
    under, over = as_section(base), as_section(change)
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return change
    name = under.get("name", over.get("name"))
    return {**under, **over} if over.get("name", name) == name else over


def merged_decode(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of `decode` with others in the place of some."""
    found = {**base, **changes}
    if "strategy" in base and "strategy" in changes:
        found["strategy"] = merged(base["strategy"], changes["strategy"])
    return found


def name_after(base: Strategy, change: Any) -> Any:
    """Return the name of the strategy that a change of this one leads to; None where it has none."""
    section = as_section(merged(base, change))
    return section.get("name") if isinstance(section, Mapping) else None


def in_full(strategy: Any) -> Any:
    """Return what somebody has written as records hold it; what is no strategy as it is."""
    section = as_section(strategy)
    kind = STRATEGIES.get(str(section.get("name"))) if isinstance(section, Mapping) else None
    try:
        return strategy if kind is None else kind.model_validate(section).model_dump(mode="json")
    except ValidationError:
        return strategy


def why_no_key(key: str, name: str) -> str:
    """Say what to do about a key that this strategy has not."""
    others = with_key(key)
    if others:
        return f"it is a key of strategy {' and '.join(others)}, not of {name}: remove it, or name one of these"
    known = keys_of_strategy(name)
    return f"unknown key; {name} has {', '.join(known)}" if known else f"unknown key; {name} has none: remove it"
