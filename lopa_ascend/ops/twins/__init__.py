"""Pure PyTorch twins of the torch_npu operators this engine uses: same names and keywords, documented rules as checks.

They run the engine's `ref` lane on any CPU without torch_npu, they are what the simulated NPU of the tests executes,
and they are what the start-up self-test on a device compares with. A violated rule raises OpRuleError; an option that
is valid on a device but unused here raises NotImplementedError. The rules come from torch_npu 2.13.0's operator
documentation for Atlas A2/A3 (scripts/lab/ascend_evidence.md lists them one by one).

Arithmetic: float32 inside, one rounding at the end; integers exactly.
"""

from lopa_ascend.ops.twins.activations import npu_dequant_swiglu_quant, npu_grouped_matmul_swiglu_quant_v2, npu_swiglu
from lopa_ascend.ops.twins.attention import npu_fused_infer_attention_score, npu_fused_infer_attention_score_v2
from lopa_ascend.ops.twins.cache import _npu_reshape_and_cache, npu_scatter_pa_kv_cache
from lopa_ascend.ops.twins.experts import (
    npu_grouped_matmul,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing_v2,
    npu_moe_token_unpermute,
)
from lopa_ascend.ops.twins.norms import npu_add_rms_norm, npu_add_rms_norm_dynamic_quant, npu_rms_norm
from lopa_ascend.ops.twins.quant import npu_dynamic_quant, npu_quant_matmul, npu_quantize
from lopa_ascend.ops.twins.rotary import npu_apply_rotary_pos_emb
from lopa_ascend.ops.twins.weights import npu_format_cast, npu_prefetch

__all__ = [
    "_npu_reshape_and_cache",
    "npu_add_rms_norm",
    "npu_add_rms_norm_dynamic_quant",
    "npu_apply_rotary_pos_emb",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_grouped_matmul",
    "npu_grouped_matmul_swiglu_quant_v2",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_moe_token_unpermute",
    "npu_prefetch",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_rms_norm",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
]
