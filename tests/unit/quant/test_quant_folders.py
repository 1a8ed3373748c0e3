"""The made-up models that the tests of `quant` share, and the reading and writing of tensor folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import bounded
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.checkpoint import load_model_config, quantizable
from quant.errors import QuantizationError
from quant.folder import ShardWriter, TensorFolder, load_quantized
from quant.folder import float_tensors as float_source
from quant.folder.checkpoint import FloatTensors
from quant.folder.tensors import INDEX_FILE
from quant.names import Layout
from quant.quantize import quantize_folder
from quant.report import QuantReport

NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 32, 48, 20
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 8
CONFIG = {
    "model_type": "Dream",
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "mask_token_id": 19,
    "eos_token_id": 18,
}
Q, KV = NUM_HEADS * HEAD_SIZE, NUM_KV_HEADS * HEAD_SIZE
SHAPES = {
    "self_attn.q_proj.weight": (Q, HIDDEN),
    "self_attn.q_proj.bias": (Q,),
    "self_attn.k_proj.weight": (KV, HIDDEN),
    "self_attn.k_proj.bias": (KV,),
    "self_attn.v_proj.weight": (KV, HIDDEN),
    "self_attn.v_proj.bias": (KV,),
    "self_attn.o_proj.weight": (HIDDEN, Q),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def float_tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A whole checkpoint; some channels of the norms are large, as outliers in real models are."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = 1 + tensors[name]
            tensors[name][3] *= 8
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_model(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_dream.py").write_text("raise SystemExit")
    return folder


def layout_of(folder: Path) -> Layout:
    return quantizable(load_model_config(str(folder)))


def quantize(folder: Path, out: Path, *arguments: Any, **settings: Any) -> QuantReport:
    return quantize_folder(folder, out, layout_of(folder), *arguments, **settings)


def load(folder: Path, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    """A rank's quantized linears."""
    share = quantizable(load_model_config(str(folder)), rank, num_ranks).linears
    linears = load_quantized(folder, layout_of(folder), share)
    return {name: tensor for linear in linears for name, tensor in linear.items()}


def floats_of(folder: Path) -> FloatTensors:
    return float_source(folder, layout_of(folder))


class Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Layer(nn.Module):
    """A decoder layer of Qwen2 layout without positions, in the tensors' dtype; linears under their run-time names."""

    def __init__(self, tensors: dict[str, Tensor], layer: int) -> None:
        super().__init__()
        own = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}
        qkv = [f"self_attn.{part}_proj" for part in "qkv"]
        bias = torch.cat([own[f"{part}.bias"] for part in qkv]) if f"{qkv[0]}.bias" in own else None
        self.qkv_proj = Linear(torch.cat([own[f"{part}.weight"] for part in qkv]), bias)
        self.o_proj = Linear(own["self_attn.o_proj.weight"], None)
        self.gate_up_proj = Linear(torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]), None)
        self.down_proj = Linear(own["mlp.down_proj.weight"], None)
        self.input_norm = nn.Parameter(own["input_layernorm.weight"])
        self.post_attention_norm = nn.Parameter(own["post_attention_layernorm.weight"])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(normed(x) * self.input_norm).split((Q, KV, KV), dim=-1)
        heads = [part.unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1) for part in (q, k, v)]
        attended = nn.functional.scaled_dot_product_attention(*(head[None] for head in heads), enable_gqa=True)[0]
        x = x + self.o_proj(attended.transpose(0, 1).flatten(1))
        gate, up = self.gate_up_proj(normed(x) * self.post_attention_norm).chunk(2, dim=-1)
        return x + self.down_proj(nn.functional.silu(gate) * up)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


class Decoder(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(tensors, layer) for layer in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(num_tokens: int = 12, seed: int = 7) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the folder's tensors as one file without an index."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX_FILE).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_hold_what_was_added_and_stay_below_their_limit(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    writer = ShardWriter(tmp_path, max_bytes=85)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    folder = TensorFolder(tmp_path)
    assert {name: folder.read(name).tolist() for name in folder.names()} == {n: t.tolist() for n, t in tensors.items()}
    assert json.loads((tmp_path / INDEX_FILE).read_text())["metadata"]["total_size"] == writer.total_bytes == 280


def test_a_tensor_is_read_in_part(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    assert folder.shape("w") == (6, 4) and folder.where("w").endswith("model.safetensors")
    assert torch.equal(folder.read("w", (slice(2, 4), slice(None))), whole[2:4])
    assert torch.equal(folder.read("w", (slice(None), slice(1, 3))), whole[:, 1:3])


def _truncate(folder: Path) -> None:
    path = folder / "part.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def _header(folder: Path, size: int, header: bytes) -> None:
    (folder / "part.safetensors").write_bytes(size.to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "part.safetensors").unlink(), "no safetensors files"),
        (_truncate, "part.safetensors: truncated"),
        (lambda folder: save_file({"w": torch.ones(2)}, folder / "other.safetensors"), "'w' is also in"),
        (lambda folder: _index(folder, {"w": "missing.safetensors"}), "missing.safetensors: the index names this file"),
        (
            lambda folder: (_index(folder, {"w": "a.safetensors"}), (folder / "a.safetensors").mkdir()),
            "a.safetensors: the index names this file, but it is no regular file",
        ),
        (lambda folder: _index(folder, {"v": "part.safetensors"}), "'v' is not in part.safetensors"),
        (lambda folder: _index(folder, {"w": "../part.safetensors"}), "in the model folder itself"),
        (lambda folder: _index(folder, ["w"]), "no weight_map"),
        (lambda folder: (folder / INDEX_FILE).write_text("{"), "not valid JSON"),
        (lambda folder: (folder / INDEX_FILE).write_text("{" + '"a":{' * 10**6), "larger or nested deeper"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"a":' + "[" * 200 + "]" * 200 + "}"), "nested deeper"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"a":[' + "[]," * 10**6 + "[]]}"), "larger or nested"),
        (lambda folder: (folder / INDEX_FILE).write_bytes(b"{}" + b" " * 2**24), "larger or nested deeper"),
        (lambda folder: (folder / INDEX_FILE).write_bytes(b'{"\xe9": 1}'), "not valid JSON .'utf-8' codec"),
        (lambda folder: (folder / INDEX_FILE).mkdir(), "cannot be read .Is a directory"),
        (lambda folder: _index(folder, {"w": "a" * 300}), "truncated or not safetensors .*File name too long"),
        (lambda folder: _index(folder, {"w": "a\nb"}), "a tensor has no proper name"),
        (lambda folder: _index(folder, {"w": "a\0b"}), "a tensor has no proper name"),
        (lambda folder: _index(folder, {"w\n" * 999: "part.safetensors"}), "a tensor has no proper name, 'w.nw"),
        (lambda folder: save_file({"a\nb": torch.ones(2)}, folder / "b.safetensors"), "a tensor has no proper name"),
        (lambda folder: _header(folder, 2**63, b"{}"), "truncated or not safetensors .a header of 9223"),
        (lambda folder: _header(folder, 2**20, b"[" * 2**20), "truncated or not safetensors"),
        (lambda folder: (folder / INDEX_FILE).write_text("[]"), "expected an object"),
        (lambda folder: [_index(folder, {}), (folder / "old.safetensors.index.json").touch()], "remove the index"),
    ],
)
def test_a_damaged_folder_is_refused_by_file(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "part.safetensors")
    damage(tmp_path)
    with bounded(5, 1), pytest.raises(QuantizationError, match=message) as caught:
        TensorFolder(tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantizationError, match="'v' is in no file"):
        TensorFolder(tmp_path).read("v")


def test_a_single_file_is_read_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Transformers reads it so: neither an index nor files that it does not name count."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    _index(tmp_path, {"w": "model-00001-of-00001.safetensors"})
    assert TensorFolder(tmp_path).read("w").tolist() == [1, 1]
    (tmp_path / INDEX_FILE).unlink()
    assert TensorFolder(tmp_path).read("w").tolist() == [1, 1]
