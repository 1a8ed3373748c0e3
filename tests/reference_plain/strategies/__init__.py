"""What each strategy does with a request's blocks: which exist, which may be filled, what a step's window is and when a
block's KV becomes final. LoPA's branches, scores and spawning are the same over all and live beside this folder.
"""

from __future__ import annotations

from common.decoding.plan import Bool
from reference_plain.blocks import BlockStrategy
from reference_plain.rules import Rules
from reference_plain.strategies.block_diffusion import BlockDiffusion
from reference_plain.strategies.canvas import OneBlockAtATime, WholeCanvas
from reference_plain.strategies.multi_block import MultiBlock
from reference_plain.strategies.pipelined import PipelinedBlocks
from reference_plain.strategies.sub_blocks import SubBlocks

_STRATEGIES: dict[str, type[BlockStrategy]] = {
    "d2f": PipelinedBlocks, "multi_block": MultiBlock, "fast_dllm": OneBlockAtATime, "vanilla": WholeCanvas,
    "block_diffusion": BlockDiffusion, "fast_dllm_v2": SubBlocks,
}  # fmt: skip
__all__ = ["block_strategy"]


def block_strategy(rules: Rules, prompt_length: int, is_masked_S: Bool) -> BlockStrategy:
    """The strategy of one request. is_masked_S: its masks, by absolute position, as they are at any time."""
    return _STRATEGIES[rules.decode.strategy](rules.decode, prompt_length, is_masked_S, rules.chunk)
