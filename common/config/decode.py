"""How a request is decoded: the `decode` section of a run, and what a row of a sweep changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.config.consistent import MIN_TEMPERATURE, contradictions
from common.config.frozen import Policy, Settings, refusing_old
from common.config.old_spellings import why_old
from common.config.strategies import D2F, STRATEGIES, AnyStrategy, Levenshtein, Strategy, as_section, merged_decode
from common.errors import did_you_mean

WindowAttention = Literal["full", "block_causal"]

NUM_CANDIDATES = 256  # the most tokens of a position that top_p and top_k can leave
MOST_STOP_TOKENS = 128
_MOST_STOP_LETTERS = 1000  # of a stop string
_PART = object()  # context of a validation: these settings are a part, whose sense depends on the others


class DecodeConfig(Settings):
    """How a request is decoded. Names are those of D2F and LoPA; descriptions give the paper's symbols."""

    _has_today_s_keys = refusing_old(why_old)

    strategy: AnyStrategy = Field(
        default=D2F(),
        description="The rule that lookaheads speed up: its name, or an object with its name and its own keys (below).",
    )
    num_lookahead: int = Field(
        default=3, ge=0, le=1000, description="k, the branches beside the anchor; 0 is the plain strategy."
    )
    block_size: int = Field(default=32, ge=1, description="Positions of a block.")
    max_new_tokens: int = Field(
        default=256,
        ge=1,
        description="The most positions that a request fills; its canvas holds the whole blocks that fit into them.",
    )
    block_add_threshold: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="tau_add: the next block opens once this share of the last one is filled (`d2f`, `multi_block`; "
        "1 with `block_diffusion` unless set).",
    )
    decoded_token_threshold: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="tau_act: a block fills at least one position a step once the block before has this share filled.",
    )
    skip_threshold: float = Field(
        default=0.9, gt=0, le=1, description="tau_conf: every mask whose token is more probable than this is filled."
    )
    fill_rule: Annotated[str, Policy("fill_rules")] = Field(
        default="threshold",
        description="Which masks of a block a step fills, at least one in any case: all above `skip_threshold` "
        "(`threshold`), of these the ones that a `share` of the branches agree on (`agreed`), or all with an "
        "entropy below `below` (`entropy`); so many that `steps` fill the block, the most confident (`static`), the "
        "first (`sequential`), or all above `skip_threshold` if those are more (`dynamic`); those of the lowest "
        "entropies whose sum stays below `bound` (`entropy_bounded`); the n most probable, while (n + 1)(1 - p) < "
        "`f` for each (`factor`), or while the Frechet bound of all being right exceeds `delta` (`frechet`).",
    )
    sampling_strategy: Annotated[str, Policy("token_confidences")] = Field(
        default="neg_entropy",
        description="Token confidence, which ranks masks and branches: the highest probability (`default`), its "
        "lead over the second (`margin`), negative entropy (`neg_entropy`), or another policy (slower, `lopa_cuda` "
        "only).",
    )
    branch_score: Annotated[str, Policy("branch_scores")] = Field(
        default="mean",
        description="How a branch is scored, C(B): the mean confidence of its remaining masks (`mean`), of the "
        "`bottom_share` of them, or of its weakest run of a block's length (`sliding_window`); the number of masks "
        "above `skip_threshold` (`num_sure`), plus its own tokens by their likelihood (`expected`), or less `risk` "
        "times the chance that they are wrong (`hedged`); entropy and its own tokens' likelihood (`ripple`); for "
        "drafts (`spawn_rule: nested`) the longest that the branch before agrees with (`agreement`), or the tokens "
        "of k = 0 in fewer passes, all (`exact`) or part (`subset`); `anchor`, `lookahead` and `random` are "
        "controls, and `created` weighs the confidence of a branch's token when it was spawned.",
    )
    spawn_rule: Annotated[str, Policy("spawn_rules")] = Field(
        default="confident",
        description="Which masks the lookaheads fill: the most confident, those with a probability nearest to "
        "`probability` (`near`), a `share` of confident and else random ones (`mixed`), evenly spread ones, or as "
        "controls uncertain or random ones; with `nested` the j-th lookahead fills the j most confident, with "
        "`pivot` each fills one half-certain mask with another token; `blocks` allows only the first so many open "
        "blocks, `entropy` only masks with at most so many nats to their left, which shortens the window, and "
        "`tokens` tries so many tokens of a mask, if at least `ratio` times as probable as the first.",
    )
    lookahead_rule: Annotated[str, Policy("lookahead_rules")] = Field(
        default="all",
        description="How many lookaheads a step tries: `all`, as published, or fewer by what the step before did.",
    )
    window_attention: WindowAttention = Field(
        default="full",
        description="What a position sees of the window: all (`full`), or nothing after its own block "
        "(`block_causal`, the only kind of `lopa_ascend`).",
    )
    shift_row: Literal["stale", "fresh"] = Field(
        default="stale",
        description="What predicts the first token after the cache: the step that committed the position before it "
        "(`stale`, as published), or the window (`fresh`).",
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
        description="What temperature, top_p and top_k change: which token is drawn (`draw`), or its probability "
        "and confidence too, as in some published code (`draw_and_confidence`, docs/families.md).",
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
        description="Above temperature 0: draw from so many of the most probable tokens (with their ties).",
    )
    stop_at_eos: bool = Field(
        default=True, description="End a request at its first end token; `false` fills the open blocks first."
    )
    stop: tuple[str, ...] = Field(
        default=(),
        description="An answer ends before the first of these texts; a special token's text counts even if special "
        "tokens are not shown.",
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(),
        max_length=MOST_STOP_TOKENS,
        description="Tokens that end an answer as the end token does; the text does not show them.",
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of texts, also where stop strings are looked for."
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="The most steps of a request; `null` is more than any needs (`d2f`: 2 x max_new_tokens + 16).",
    )
    eos_token_id: int | None = Field(default=None, description="The end token; `null` is the checkpoint's own.")
    mask_probability: Literal["excluded", "counted"] = Field(
        default="excluded",
        description="Whether the mask token, never filled in, counts in the others' probabilities (`counted`, as in "
        "most published code; slower, `lopa_cuda` only).",
    )
    mask_token_id: int | None = Field(
        default=None, description="The token of an unfilled position; `null` is the checkpoint's own."
    )

    def changed(self, changes: Mapping[str, Any]) -> DecodeConfig:
        """These settings with others in the place of some. Raises pydantic's ValidationError.

        top_p and top_k, which act above temperature 0 only, go with a temperature that is changed to it.
        """
        greedy = {"top_p": 1.0, "top_k": None} if is_greedy(changes.get("temperature")) else {}
        wanted = merged_decode({"strategy": self.strategy}, {**greedy, **changes})
        part = DecodeConfig.model_validate(wanted, context=_PART)  # a server does this for each of its requests
        if part.strategy.is_from_zero == self.strategy.is_from_zero:  # else other settings have other defaults
            made = self.model_copy(update={name: getattr(part, name) for name in part.model_fields_set})
            if next(contradictions(made), None) is None:
                return made
        own = {name: getattr(self, name) for name in self.model_fields_set}
        return DecodeConfig.model_validate({**own, **wanted})  # says which contradict each other, as of a file

    @field_validator("strategy", mode="before")
    @classmethod
    def _is_named(cls, value: Any) -> Any:
        section = as_section(value)
        if not isinstance(section, Mapping):
            raise ValueError(f"set it to {_names()}, or to an object with this name and keys of its own")
        name = section.get("name", "d2f")
        if name not in tuple(STRATEGIES):
            raise ValueError(f"{did_you_mean(str(name), tuple(STRATEGIES))}set it to {_names()}")
        return value if isinstance(value, Strategy) else {"name": "d2f", **section}

    @field_validator("num_lookahead", mode="before")
    @classmethod
    def _is_a_count(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("the run's pace says that now: remove this, and set pace to balanced")
        return value

    @field_validator("temperature")
    @classmethod
    def _is_0_or_tells_logits_apart(cls, value: float) -> float:
        return 0.0 if is_greedy(value) else value

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
        if self.strategy.is_from_zero:
            self._take_defaults_of_blocks_from_zero()
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    def _take_defaults_of_blocks_from_zero(self) -> None:
        own = {"block_add_threshold": 1.0, "window_attention": "block_causal"}
        if isinstance(self.strategy, Levenshtein) and self.strategy.counts_mask:
            own["mask_probability"] = "counted"
        self.__dict__.update({name: value for name, value in own.items() if name not in self.model_fields_set})


def _names() -> str:
    *first, last = STRATEGIES
    return f"{', '.join(first)} or {last}"


def is_greedy(temperature: Any) -> bool:
    """Whether this temperature, as somebody wrote it, takes the most probable token."""
    try:
        return float(temperature) < MIN_TEMPERATURE
    except (TypeError, ValueError, OverflowError):  # refused where it is checked
        return False
