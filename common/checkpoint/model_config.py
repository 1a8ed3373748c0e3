"""The facts of one checkpoint: what weights, operators and decoding must know of its family, as data.

Weights, tokenizer and engines work with these checked numbers; none of them sees the JSON. `families` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError

Family = Literal["dream", "llada", "sdar", "sdar_moe", "fast_dllm_v2", "llada2_moe", "stable_diffcoder"]
BlockOrigin = Literal["prompt_end", "zero"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The mixture-of-experts layers. intermediate_size: of one expert, and of one shared expert.

    num_groups, top_groups: experts are chosen inside the best `top_groups` of `num_groups` consecutive groups; 1 and 1:
    among all. normalise: the chosen scores are divided by their sum; then multiplied by `scaling`. first_dense: so many
    first layers have a dense MLP. has_expert_bias: a bias is added to the scores for choosing, not for weighing.

    capacity, block_size: experts that a block of so many tokens admits, by the largest score that any of its tokens
    gives them, and among which each of its tokens chooses; blocks are counted from position 0. 0: each token chooses
    for itself.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    num_groups: int
    top_groups: int
    scoring: Scoring
    normalise: bool
    scaling: float
    first_dense: int
    has_expert_bias: bool
    capacity: int = 0
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes, ids and conventions of one checkpoint.

    mask_token_id: None where the folder does not say it. eos_token_id: the first of stop_token_ids, which are all end
    tokens that the files list. intermediate_size: of dense MLPs; 0 where all layers are mixtures of experts.

    shift: 1: the logits at p - 1 predict position p; 0: its own do. block_origin: where blocks are counted from.
    block_size: the one that the config names, None where it names none. rotary_size: dimensions of a head that are
    rotated, its first ones. rounds_rotary: cos and sin are rounded to the model's dtype before they are used.
    edit_ids: tokens that a model predicts to delete the position, and to insert one before it; None where it edits by
    replacing alone.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    mask_token_id: int | None
    eos_token_id: int
    stop_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    shift: Literal[0, 1]
    block_origin: BlockOrigin
    block_size: int | None
    qk_norm: bool
    attention_bias: bool
    rotary_size: int
    rounds_rotary: bool
    moe: MoEConfig | None
    edit_ids: tuple[int, int] | None = None

    @property
    def routing_block(self) -> int:
        """Tokens that choose their experts together; 0: each for itself."""
        return self.moe.block_size if self.moe is not None else 0

    def mask_of(self, own: int | None) -> int:
        """`own`, the run's `decode.mask_token_id`, or the checkpoint's. ConfigError where neither is known."""
        mask_token_id = self.mask_token_id if own is None else own
        if mask_token_id is None:
            raise ConfigError(
                f"decode.mask_token_id: missing, and the files of this {self.family} checkpoint do not name the mask "
                "token: set it to the id that the model was trained with"
            )
        return mask_token_id

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_dense

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """KV heads that a tensor-parallel rank holds: its share, or one that it shares with other ranks."""
        return max(1, self.num_kv_heads // tp_size)
