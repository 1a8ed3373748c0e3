"""The CUDA engine's fused stages: the decoder layer's pieces as Triton kernels, called by lopa_cuda.ops.fused.

    embed -> [ norm -> qkv linear -> rope_prewrite -> attention -> o linear
               -> norm -> gate_up linear + SwiGLU -> down linear
                       or router_logits -> route -> deal_pairs -> mix_experts, shared experts beside them ] x layers
          -> norm -> head -> head_statistics -> merge_statistics, or sampled_statistics where rows are drawn;
             class_statistics beside them for answers that are held to a format

Every function works on device tensors alone: no host synchronisation, grids from shapes only, so that it can be
captured in a CUDA graph and replayed for any lengths and positions. Results are new tensors; activations are contiguous
bf16. Each follows a plain version that stays its specification: common.model, lopa_cuda.ops.plain, quant.w8a8.
Importing this package needs Triton.

Shapes: T tokens (the entries of all rows), D model width, N query heads, K KV heads, H head size, I MLP width,
V vocabulary, C a linear's output channels, Z split-K parts, P vocabulary shards.
"""

from lopa_cuda.kernels.attention import BLOCK_QUERIES, window_attention
from lopa_cuda.kernels.class_statistics import class_statistics
from lopa_cuda.kernels.experts import deal_pairs, expert_input, mix_experts
from lopa_cuda.kernels.head_statistics import head_statistics, merge_statistics, sampled_statistics
from lopa_cuda.kernels.launch import EMPTY, Mirrors, Partials, Quantize, Shared
from lopa_cuda.kernels.linear import gate_up_swiglu, invariant_linear, linear, linear_partials, sum_partials
from lopa_cuda.kernels.meet import STACK_BLOCK, meet, stack_of_ranks
from lopa_cuda.kernels.norm import add_rms_norm
from lopa_cuda.kernels.quantize import quantize_per_token, quantize_static
from lopa_cuda.kernels.rope_prewrite import rope_prewrite
from lopa_cuda.kernels.route import route, router_logits
from lopa_cuda.kernels.rows import copy_rows
from lopa_cuda.kernels.swiglu import swiglu

__all__ = [
    "BLOCK_QUERIES",
    "EMPTY",
    "STACK_BLOCK",
    "Mirrors",
    "Partials",
    "Quantize",
    "Shared",
    "add_rms_norm",
    "class_statistics",
    "copy_rows",
    "deal_pairs",
    "expert_input",
    "gate_up_swiglu",
    "head_statistics",
    "invariant_linear",
    "linear",
    "linear_partials",
    "meet",
    "merge_statistics",
    "mix_experts",
    "quantize_per_token",
    "quantize_static",
    "rope_prewrite",
    "route",
    "router_logits",
    "sampled_statistics",
    "stack_of_ranks",
    "sum_partials",
    "swiglu",
    "window_attention",
]
