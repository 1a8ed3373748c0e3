"""What each kind of GE node computes. Inputs and outputs go by the names that the graph gives them; tensors are on the
simulated device, constants on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sim.calls import SimulationError

DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_INT8": torch.int8,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_BOOL": torch.bool,
}
# As attributes name them.
_BY_NUMBER = {0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 9: torch.int64, 27: torch.bfloat16}
_ROTARY_TND = 4
# torch 2.13 renames the first to the second, and warns.
_gather_ranks = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Output(NamedTuple):
    """shape: the logical one, also where the memory has another layout (FRACTAL_NZ)."""

    name: str
    dtype: str
    shape: list[int]
    device_type: str


class Node:
    """inputs: (name, `node:output` or nothing), without control edges."""

    def __init__(self, op: Any) -> None:
        self.kind: str = op.type
        self.name: str = op.name
        sources = [source for source in op.input if not source.endswith(":-1")]
        self.inputs = list(zip([desc.name for desc in op.input_desc], sources, strict=False))
        self.outputs = [Output(desc.name, _dtype(desc), _shape_of(desc), desc.device_type) for desc in op.output_desc]
        self.attributes = {key: _attribute(value) for key, value in op.attr.items() if not key.startswith("_")}


def _dtype(desc: Any) -> str:
    names = type(desc).DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    return str(names[desc.dtype].name)


def _shape_of(desc: Any) -> list[int]:
    return list(desc.attr["origin_shape"].list.i) if "origin_shape" in desc.attr else list(desc.shape.dim)


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "list":
        lists = value.list
        return next((list(getattr(lists, name)) for name in ("i", "f", "b", "s") if getattr(lists, name)), [])
    if kind == "t":
        return _tensor(value.t)
    found = getattr(value, kind)
    return found.decode() if kind == "s" else found


def _tensor(definition: Any) -> Tensor:
    dtype, shape = DTYPES[_dtype(definition.desc)], list(definition.desc.shape.dim)
    if not definition.data:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(definition.data), dtype=dtype).reshape(shape)


Given = dict[str, Any]
Compute = Callable[[Node, Given], list[Any]]
NODES: dict[str, Compute] = {}


def _node(*kinds: str) -> Callable[[Compute], Compute]:
    def register(compute: Compute) -> Compute:
        NODES.update(dict.fromkeys(kinds, compute))
        return compute

    return register


def _npu() -> Any:
    import torch_npu

    return torch_npu


def _on_npu(value: Tensor) -> Tensor:
    """A constant with dimensions, as the kernel gets it."""
    return value.npu() if value.device.type == "cpu" and value.dim() else value


# ---- the fused kernels


@_node("RmsNorm")
def _rms_norm(node: Node, given: Given) -> list[Any]:
    return list(_npu().npu_rms_norm(given["x"], given["gamma"], node.attributes["epsilon"]))


@_node("AddRmsNorm")
def _add_rms_norm(node: Node, given: Given) -> list[Any]:
    return list(_npu().npu_add_rms_norm(given["x1"], given["x2"], given["gamma"], node.attributes["epsilon"]))


@_node("AddRmsNormDynamicQuant")
def _add_rms_norm_dynamic_quant(node: Node, given: Given) -> list[Any]:
    """epsilon is left out of a graph where it is the operator's default."""
    mask = [bool(flag) for flag in node.attributes["output_mask"]]
    return list(
        _npu().npu_add_rms_norm_dynamic_quant(
            given["x1"], given["x2"], given["gamma"], epsilon=node.attributes.get("epsilon", 1e-6), output_mask=mask
        )
    )


@_node("DynamicQuant")
def _dynamic_quant(node: Node, given: Given) -> list[Any]:
    return list(_npu().npu_dynamic_quant(given["x"]))


@_node("QuantBatchMatmulV3")
def _quant_matmul(node: Node, given: Given) -> list[Any]:
    _refuse_transposed(node)
    options = {"bias": given.get("bias"), "pertoken_scale": given.get("pertoken_scale")}
    dtype = _BY_NUMBER[node.attributes["dtype"]]
    return [_npu().npu_quant_matmul(given["x1"], given["x2"], given["scale"], output_dtype=dtype, **options)]


@_node("DequantSwigluQuant")
def _dequant_swiglu_quant(node: Node, given: Given) -> list[Any]:
    assert node.attributes["quant_mode"] == "dynamic"
    scales = {"weight_scale": given["weight_scale"], "activation_scale": given["activation_scale"]}
    left = bool(node.attributes["activate_left"])
    return list(_npu().npu_dequant_swiglu_quant(given["x"], **scales, activate_left=left, quant_mode=1))


@_node("SwiGlu")
def _swiglu(node: Node, given: Given) -> list[Any]:
    return [_npu().npu_swiglu(given["x"], dim=node.attributes["dim"])]


@_node("ApplyRotaryPosEmb")
def _rotate(node: Node, given: Given) -> list[Any]:
    """A reference operator: the rotated values lie in its inputs."""
    assert node.attributes["layout"] == _ROTARY_TND
    _npu().npu_apply_rotary_pos_emb(given["query"], given["key"], given["cos"], given["sin"], layout="TND")
    return [given["query"], given["key"]]


@_node("ScatterPaKvCache")
def _write_kv(node: Node, given: Given) -> list[Any]:
    """A reference operator: it writes into the caches that it is given. Norm is what a graph leaves out."""
    caches = given["key_cache"], given["value_cache"]
    mode = node.attributes.get("cache_mode", "Norm")
    _npu().npu_scatter_pa_kv_cache(given["key"], given["value"], *caches, given["slot_mapping"], cache_mode=mode)
    return list(caches)


@_node("FusedInferAttentionScore")
def _attention(node: Node, given: Given) -> list[Any]:
    lengths = given["actual_seq_lengths"], given["actual_seq_lengths_kv"]
    if any(length.device.type != "cpu" for length in lengths):
        raise SimulationError("attention's lengths lie on the device: the host would wait for them in every layer")
    ends, visible = (length.tolist() for length in lengths)
    attributes = node.attributes
    attended, lse = _npu().npu_fused_infer_attention_score_v2(
        given["query"], given["key0"], given["value0"], actual_seq_qlen=ends, actual_seq_kvlen=visible,
        block_table=given["block_table"], num_query_heads=attributes["num_heads"],
        num_key_value_heads=attributes["num_key_value_heads"], softmax_scale=attributes["scale"],
        input_layout=attributes["input_layout"], sparse_mode=attributes["sparse_mode"],
        block_size=attributes["block_size"],
    )  # fmt: skip
    return [attended, lse]


@_node("Cmo")
def _prefetch(node: Node, given: Given) -> list[Any]:
    _npu().npu_prefetch(given["src"], None, node.attributes["max_size"], node.attributes.get("offset", 0))
    return []


@_node("HcomAllReduce")
def _all_reduce(node: Node, given: Given) -> list[Any]:
    from sim.ge import group_of

    assert node.attributes["reduction"] == "sum"
    total = given["x"].clone()
    dist.all_reduce(total, group=group_of(node.attributes["group"]))
    return [total]


@_node("HcomAllGather")
def _all_gather(node: Node, given: Given) -> list[Any]:
    from sim.ge import group_of

    x = given["x"].contiguous()
    gathered = torch.empty((node.attributes["rank_size"] * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    _gather_ranks(gathered, x, group=group_of(node.attributes["group"]))
    return [gathered]


# ---- products and copies


def _refuse_transposed(node: Node) -> None:
    if node.attributes.get("transpose_x1") or node.attributes.get("transpose_x2"):
        raise NotImplementedError(f"{node.kind} with transposed factors is not simulated")


@_node("MatMul", "MatMulV2")
def _matmul(node: Node, given: Given) -> list[Any]:
    _refuse_transposed(node)
    if given.get("bias") is not None:
        return [torch.addmm(given["bias"], given["x1"], given["x2"])]
    return [torch.mm(given["x1"], given["x2"])]


@_node("Transpose")
def _transpose(node: Node, given: Given) -> list[Any]:
    return [given["x"].permute(given["perm"].tolist()).contiguous()]


@_node("TensorMove")
def _move(node: Node, given: Given) -> list[Any]:
    return [given["x"].clone()]


@_node("Identity")
def _same(node: Node, given: Given) -> list[Any]:
    return [given["x"]]


@_node("SplitV")
def _split(node: Node, given: Given) -> list[Any]:
    parts = torch.split(given["x"], given["size_splits"].tolist(), dim=int(given["split_dim"]))
    return [part.contiguous() for part in parts]


# ---- shapes


@_node("Const")
def _constant(node: Node, given: Given) -> list[Any]:
    return [node.attributes["value"]]


@_node("Reshape")
def _reshape(node: Node, given: Given) -> list[Any]:
    return [given["x"].view(given["shape"].tolist())]


@_node("Unsqueeze")
def _unsqueeze(node: Node, given: Given) -> list[Any]:
    x = given["x"]
    for axis in node.attributes["axes"]:
        x = x.unsqueeze(axis)
    return [x]


@_node("ExpandDims")
def _expand(node: Node, given: Given) -> list[Any]:
    return [given["x"].unsqueeze(int(given["axis"]))]


@_node("Shape")
def _shape(node: Node, given: Given) -> list[Any]:
    return [torch.tensor(given["x"].shape)]


@_node("BroadcastTo")
def _broadcast(node: Node, given: Given) -> list[Any]:
    return [given["x"].broadcast_to(given["shape"].tolist()).contiguous()]


@_node("Fill")
def _fill(node: Node, given: Given) -> list[Any]:
    return [torch.full(given["dims"].tolist(), given["value"].item(), dtype=given["value"].dtype, device="npu")]


@_node("Unpack")
def _unpack(node: Node, given: Given) -> list[Any]:
    return [part.contiguous() for part in given["x"].unbind(node.attributes["axis"])]


@_node("Pack")
def _pack(node: Node, given: Given) -> list[Any]:
    return [torch.stack([_on_npu(part) for part in given.values()], dim=node.attributes["axis"])]


@_node("ConcatV2", "ConcatD")
def _concat(node: Node, given: Given) -> list[Any]:
    axis = int(given.pop("concat_dim")) if "concat_dim" in given else node.attributes["concat_dim"]
    return [torch.cat(list(given.values()), dim=axis)]


@_node("StridedSliceV2")
def _slice(node: Node, given: Given) -> list[Any]:
    places = [given[name].reshape(-1).tolist() for name in ("axes", "begin", "end", "strides")]
    picked = given["x"]
    for axis, begin, end, stride in zip(*places, strict=True):
        assert stride > 0
        length = picked.shape[axis]
        picked = picked.narrow(axis, begin, min(end, length) - begin)[
            (slice(None),) * axis + (slice(None, None, stride),)
        ]
    return [picked.contiguous()]


# ---- lookups


@_node("GatherV2")
def _gather_rows(node: Node, given: Given) -> list[Any]:
    index, axis = _on_npu(given["indices"]), int(given["axis"])
    x = given["x"]
    picked = torch.index_select(x, axis, index.reshape(-1))
    return [picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])]


@_node("GatherElements")
def _gather(node: Node, given: Given) -> list[Any]:
    return [torch.gather(given["x"], node.attributes["dim"], given["index"])]


@_node("ScatterElements")
def _scatter(node: Node, given: Given) -> list[Any]:
    assert node.attributes["reduction"] == "none"
    index, updates = (_on_npu(given[name]) for name in ("indices", "updates"))
    return [torch.scatter(given["data"], node.attributes["axis"], index.long(), updates)]


@_node("TopKV2")
def _top(node: Node, given: Given) -> list[Any]:
    values, index = torch.topk(given["x"], int(given["k"]), dim=node.attributes["dim"])
    return [values, index.int()]


@_node("ArgMaxV2")
def _arg_max(node: Node, given: Given) -> list[Any]:
    return [torch.argmax(given["x"], dim=int(given["dimension"]))]


@_node("ArgMaxWithValue")
def _max(node: Node, given: Given) -> list[Any]:
    dim, keep = node.attributes["dimension"], bool(node.attributes["keep_dims"])
    index = torch.argmax(given["x"], dim=dim, keepdim=keep)
    return [index.int(), torch.amax(given["x"], dim=dim, keepdim=keep)]


# ---- one by one


@_node("Cast")
def _cast(node: Node, given: Given) -> list[Any]:
    return [given["x"].to(_BY_NUMBER[node.attributes["dst_type"]])]


@_node("ReduceSum")
def _sum(node: Node, given: Given) -> list[Any]:
    axes = given["axes"].reshape(-1).tolist()
    return [given["x"].sum(dim=axes, keepdim=bool(node.attributes["keep_dims"]))]


@_node("MaskedFill")
def _masked_fill(node: Node, given: Given) -> list[Any]:
    return [given["x"].masked_fill(given["mask"], float(given["value"]))]


@_node("SelectV2")
def _select(node: Node, given: Given) -> list[Any]:
    return [torch.where(given["condition"], given["then"], given["else"])]


def _binary(kind: str, compute: Callable[[Any, Any], Any]) -> None:
    NODES[kind] = lambda node, given: [compute(_on_npu(given["x1"]), _on_npu(given["x2"]))]


for _kind, _compute in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "RealDiv": torch.div, "Greater": torch.gt,
    "Equal": torch.eq, "Maximum": torch.maximum,
}.items():  # fmt: skip
    _binary(_kind, _compute)
NODES["Exp"] = lambda node, given: [torch.exp(given["x"])]
NODES["Reciprocal"] = lambda node, given: [torch.reciprocal(given["x"])]
NODES["Log"] = lambda node, given: [torch.log(given["x"])]
