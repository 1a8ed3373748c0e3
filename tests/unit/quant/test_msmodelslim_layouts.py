"""What msmodelslim 26.1.0 writes, tensor by tensor: read, or refused with the cause.

The layouts are described here as its AscendV1Saver writes them; where msmodelslim can be imported, its own functions
are held against the description.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from test_quant_folders import CONFIG, HIDDEN, float_tensors, floats_of, layout_of
from test_quant_folders import load as load_linears
from torch import Tensor

from common.checkpoint import load_model_config, load_weights
from common.errors import ConfigError
from quant import w8a8
from quant.errors import QuantizationError
from quant.folder import schemes_of

Written = dict[str, tuple[str, Tensor]]  # by name: scheme and tensor
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOWN = "model.layers.0.mlp.down_proj"


class Linear(NamedTuple):
    """A quantized linear as msmodelslim holds it. weight int8 [N, K], weight_scale [N], input_scale and offset
    scalars."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_offset: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        quantized, scale = w8a8.quantize_weight(weight.float())
        return cls(quantized, scale.float(), torch.tensor(0.05), torch.tensor(3.0), bias)


def dynamic(linear: Linear) -> Written:
    scale = linear.weight_scale[:, None]
    return {
        "weight": ("W8A8_DYNAMIC", linear.weight),
        "weight_scale": ("W8A8_DYNAMIC", scale),
        "weight_offset": ("W8A8_DYNAMIC", torch.zeros_like(scale)),
        **_bias(linear),
    }


def static(linear: Linear, as_int64: bool = True) -> Written:
    """Without scales of the weight. deq_scale has the bits of fp32 in int64 unless the adapter says bfloat16."""
    deq_scale = linear.input_scale * linear.weight_scale
    bias = torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias.float()
    correction = linear.weight.float().sum(dim=1) * linear.input_offset
    stored = deq_scale.view(torch.int32).long() if as_int64 else deq_scale
    return {
        "weight": ("W8A8", linear.weight),
        "quant_bias": ("W8A8", torch.round(bias / deq_scale - correction).to(torch.int32)),
        "input_scale": ("W8A8", linear.input_scale[None]),
        "input_offset": ("W8A8", linear.input_offset[None]),
        "deq_scale": ("W8A8", stored),
        **_bias(linear),
    }


def static_bf16(linear: Linear) -> Written:
    return static(linear, as_int64=False)


def mix(linear: Linear) -> Written:
    both = {**dynamic(linear), **static(linear)}
    return {name: (scheme if scheme == "FLOAT" else "W8A8_MIX", tensor) for name, (scheme, tensor) in both.items()}


def grouped(linear: Linear) -> Written:
    """W8A8_DYNAMIC per group, of which the description says group_size too."""
    scale = linear.weight_scale[:, None].expand(-1, 4).contiguous()
    return dynamic(linear) | {
        "weight_scale": ("W8A8_DYNAMIC", scale),
        "weight_offset": ("W8A8_DYNAMIC", torch.zeros_like(scale)),
    }


def not_fused(linear: Linear) -> Written:
    """Non-fusion smoothing around a dynamic linear."""
    inner = {f"linear.{name}": value for name, value in dynamic(linear).items()}
    return {"div.mul_scale": ("FLOAT", torch.ones(linear.weight.shape[1])), **inner}


def as_scheme(scheme: str) -> Callable[[Linear], Written]:
    def save(linear: Linear) -> Written:
        named = {"FLOAT": "FLOAT"}
        return {name: (named.get(old, scheme), tensor) for name, (old, tensor) in dynamic(linear).items()}

    return save


def left_float(linear: Linear) -> Written:
    return {"weight": ("FLOAT", linear.weight.to(torch.bfloat16)), **_bias(linear)}


def _bias(linear: Linear) -> Written:
    return {} if linear.bias is None else {"bias": ("FLOAT", linear.bias.float())}


def write(folder: Path, save: dict[str, Callable[[Linear], Written]], num_shards: int = 1, **described: Any) -> Path:
    """A folder as its saver leaves it. save: by a linear's last name, or `other`."""
    folder.mkdir()
    floats, written = float_tensors(), {}
    for name, tensor in floats.items():
        module, _, suffix = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if kind not in LINEARS:
            written[name] = ("FLOAT", tensor)
        elif suffix == "weight":
            linear = Linear.of(tensor, floats.get(f"{module}.bias"))
            parts = save.get(kind, save["other"])(linear)
            written |= {f"{module}.{part}": value for part, value in parts.items()}
    return write_files(folder, written, num_shards, **described)


def write_files(folder: Path, written: Written, num_shards: int = 1, **described: Any) -> Path:
    names = sorted(written)
    shards = [names[first::num_shards] for first in range(num_shards)]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"quant_model_weights-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: written[name][1].contiguous() for name in shard}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "quant_model_weights.safetensors.index.json").write_text(json.dumps(index))
    tree = {name: scheme for name, (scheme, _) in written.items()}
    usual = {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "metadata": {}, "group_size": 0, "optional": {}}
    (folder / "quant_model_description.json").write_text(json.dumps({**tree, **usual, **described}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def add(folder: Path, name: str, scheme: str | None, tensor: Tensor | None, **described: Any) -> Path:
    """One more tensor, in a file of its own; scheme None: not described. tensor None: described only."""
    path = folder / "quant_model_description.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **({name: scheme} if scheme else {}), **described}))
    if tensor is not None:
        save_file({name: tensor}, folder / "extra.safetensors")
        index = folder / "quant_model_weights.safetensors.index.json"
        tree = json.loads(index.read_text())
        tree["weight_map"][name] = "extra.safetensors"
        index.write_text(json.dumps(tree))
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    """All of it, as an engine does: the quantized linears, then the rest."""
    quantized = load_linears(folder)
    modules = {name.rpartition(".")[0] for name in quantized}
    without = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
    rest = load_weights(
        folder, load_model_config(str(folder)), tp_rank=0, tp_size=1, dtype=torch.float32,
        source=floats_of(folder), without=without,
    )  # fmt: skip
    return {**rest, **quantized}


READ = {
    "dynamic": ({"other": dynamic}, {"W8A8_DYNAMIC"}),
    "static": ({"other": static}, {"W8A8"}),
    "static of a bfloat16 adapter": ({"other": static_bf16}, {"W8A8"}),
    "mix": ({"other": mix}, {"W8A8_DYNAMIC"}),
    "mix, dynamic down": ({"other": mix, "down_proj": dynamic}, {"W8A8_DYNAMIC"}),
    "static attention, dynamic MLP": (
        {"other": static, "gate_proj": dynamic, "up_proj": dynamic, "down_proj": dynamic},
        {"W8A8", "W8A8_DYNAMIC"},
    ),
    "float down": ({"other": dynamic, "down_proj": left_float}, {"W8A8_DYNAMIC", "FLOAT"}),
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("layout", READ)
def test_layouts_are_read(tmp_path: Path, layout: str, num_shards: int) -> None:
    save, schemes = READ[layout]
    folder = write(tmp_path / "m", save, num_shards)
    assert set(schemes_of(folder, layout_of(folder)).values()) == schemes
    loaded = load(folder)
    weight = float_tensors()["model.layers.1.self_attn.o_proj.weight"].float()
    scale = loaded["layers.1.o_proj.weight_scale"]
    assert (loaded["layers.1.o_proj.weight"].float() * scale[:, None] - weight).abs().max() <= scale.max()


def test_an_offline_rotation_is_in_the_weights_already(tmp_path: Path) -> None:
    """The rotation's matrix lies in a file of its own, for training on."""
    quarot = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    folder = write(tmp_path / "m", {"other": dynamic}, optional=quarot)
    (folder / "optional").mkdir()
    save_file({"global_rotation": torch.eye(HIDDEN)}, folder / "optional" / "quarot.safetensors")
    assert "layers.0.qkv_proj.weight" in load(folder)


def rotated(name: str) -> Callable[[Path], object]:
    return lambda folder: add(write(folder, {"other": dynamic}), name, "FLOAT", torch.eye(4))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rotation beside the linears": (
        rotated("model.layers.0.self_attn.rotation"),
        r"model\.layers\.0\.self_attn\.rotation: this model does not read it, .* such as an online rotation",
    ),
    "a rotation of a linear": (
        rotated(f"{DOWN}.rotation"),
        r"down_proj\.rotation: nothing reads it, and the quantized weight beside it may need it",
    ),
    "a rotation inside of a linear": (rotated(f"{DOWN}.rotation.matrix"), r"rotation\.matrix: this model does not"),
    "a rotation of heads": (
        lambda folder: add(
            write(folder, {"other": dynamic}),
            "model.rotation.heads_rotation",
            None,
            torch.eye(4),
            metadata={"quarot": {"heads_rotation": {}}},
        ),
        r"metadata\.quarot: rotated activations are not supported",
    ),
    "8-bit KV": (
        lambda folder: add(
            write(folder, {"other": dynamic}),
            "model.layers.0.self_attn.k_proj.kv_cache_scale",
            "C8",
            torch.ones(16),
            kv_cache_type="C8",
        ),
        r"kv_cache_scale: scheme 'C8' is not supported",
    ),
    "quantized attention": (
        lambda folder: add(write(folder, {"other": dynamic}), "model.layers.0.self_attn.quant_type", "FP8", None),
        r"quant_type: scheme 'FP8' is not supported",
    ),
    "4-bit weights": (
        lambda folder: write(folder, {"other": as_scheme("W4A8_DYNAMIC")}, model_quant_type="W4A8_DYNAMIC"),
        r"model_quant_type: scheme 'W4A8_DYNAMIC' is not supported",
    ),
    "float activations": (
        lambda folder: write(folder, {"other": dynamic, "down_proj": as_scheme("W8A16")}),
        r"down_proj\.\w+: scheme 'W8A16' is not supported",
    ),
    "groups": (
        lambda folder: write(folder, {"other": grouped}, group_size=8),
        r"q_proj\.weight_offset: shape \[32, 4\], a scale for each of 4 groups of inputs; .* per channel",
    ),
    "smoothing that is not fused": (
        lambda folder: write(folder, {"other": dynamic, "o_proj": not_fused}),
        r"o_proj\.linear\.\w+': its input is scaled by '[\w.]*o_proj\.div\.mul_scale' at run time \(non-fusion",
    ),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_not_supported_is_refused_with_the_cause(tmp_path: Path, layout: str) -> None:
    make, sentence = REFUSED[layout]
    make(tmp_path / "m")
    with pytest.raises((QuantizationError, ConfigError), match=sentence) as refused:
        load(tmp_path / "m")
    assert str(tmp_path) in str(refused.value)


def test_what_older_checkpoints_store_though_it_is_computed_is_no_obstacle(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert load(add(write(tmp_path / "m", {"other": dynamic}), name, "FLOAT", torch.ones(4)))


SAVERS = {
    "on_w8a8_dynamic_per_channel": dynamic,
    "on_w8a8_static": static,
    "on_w8a8_pd_mix": mix,
    "on_w8a8_dynamic_per_group": grouped,
}


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_saver_writes_what_is_described(name: str, with_bias: bool) -> None:
    saver = pytest.importorskip("msmodelslim.core.quant_service.modelslim_v1.save.ascendv1").AscendV1Saver
    linear = Linear.of(torch.randn(8, 16), torch.randn(8) if with_bias else None)
    fields = linear._asdict() | {"group_size": 4}
    if name.endswith("per_group"):
        fields["weight_scale"] = linear.weight_scale[:, None].expand(-1, 4)
    written: Written = {}
    itself = SimpleNamespace(
        update_quant_type=lambda scheme: None,
        write_tensor=lambda key, scheme, tensor: written.update({key.removeprefix("x."): (scheme, tensor)}),
        _global_torch_dtype_is_bf16=False,
    )
    getattr(saver, name)(itself, "x", SimpleNamespace(**fields))
    described = SAVERS[name](linear)
    assert written.keys() == described.keys()
    for key, (scheme, tensor) in described.items():
        assert (written[key][0], written[key][1].dtype) == (scheme, tensor.dtype), key
        assert torch.equal(written[key][1], tensor), key
