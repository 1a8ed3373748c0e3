"""Quantized folders: ours round-trip, msmodelslim's are read, tensor-parallel shares reassemble, damage is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_quant_folders import (
    CONFIG,
    HIDDEN,
    Decoder,
    edit_json,
    edit_tensors,
    float_tensors,
    floats_of,
    inputs,
    layout_of,
    load,
    quantize,
    write_model,
)  # fmt: skip
from torch import Tensor

from common.errors import ConfigError
from quant import w8a8
from quant.calibration import calibrate
from quant.errors import QuantizationError
from quant.folder import schemes_of
from quant.folder.description import read_description
from quant.layout import is_quantized_folder
from quant.linear import install_linears, swap_linears
from quant.names import LINEARS, Layout
from quant.quantize import FolderScheme

DESCRIPTION = "quant_model_description.json"
Q0, K0, V0 = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One quantized folder of every scheme, of the same model."""
    root = tmp_path_factory.mktemp("folders")
    model = write_model(root / "float", float_tensors())
    decoder = Decoder({name: tensor.float() for name, tensor in float_tensors().items()})
    calibration = calibrate(decoder, [lambda: decoder(inputs())])
    quantize(model, root / "w8a8_dynamic", "w8a8_dynamic", max_shard_bytes=5000)
    quantize(model, root / "w8a8", "w8a8", calibration)
    half = write_model(root / "half", float_tensors(dtype=torch.float16), torch_dtype="float16")
    quantize(half, root / "w8a8_half", "w8a8", calibration)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_a_folder_gives_the_model_that_quantizing_at_load_gives(folders: dict[str, Path], scheme: FolderScheme) -> None:
    tensors = {name: tensor.float() for name, tensor in float_tensors().items()}
    loaded, swapped = Decoder(tensors), Decoder(tensors)
    calibration = calibrate(swapped, [lambda: swapped(inputs())])
    install_linears(loaded, load(folders[scheme]), torch.float32)
    swap_linears(swapped, scheme, calibration=calibration)
    assert torch.equal(loaded(inputs()), swapped(inputs()))
    ours, theirs = loaded.state_dict(), swapped.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_folder_of_both_schemes_is_read_as_dynamic(copy: Callable[[str], Path]) -> None:
    """msmodelslim's W8A8_MIX has the tensors of a static linear beside those of a dynamic one."""
    folder = copy("w8a8")
    static = load(folder)
    text = (folder / DESCRIPTION).read_text()
    (folder / DESCRIPTION).write_text(text.replace('"W8A8"', '"W8A8_MIX"'))
    found = load(folder)
    assert {name.rpartition(".")[2] for name in found} == {"weight", "weight_scale", "bias"}
    shared = [name for name in found if name in static]
    assert shared and all(torch.equal(found[name], static[name]) for name in shared)
    assert set(schemes_of(folder, layout_of(folder)).values()) == {"W8A8_DYNAMIC"}
    (folder / DESCRIPTION).write_text(text.replace('"W8A8"', '"W8A8_MIX"').replace(f"{Q0}.deq_scale", f"{Q0}.other"))
    with pytest.raises(QuantizationError, match=r"\.(other|deq_scale)"):
        load(folder)


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_every_linear_has_its_scheme(folders: dict[str, Path], scheme: str) -> None:
    found = schemes_of(folders[scheme], layout_of(folders[scheme]))
    assert set(found.values()) == {scheme.upper()} and len(found) == 2 * len(LINEARS)


@pytest.mark.parametrize("scheme, name", [("w8a8_dynamic", "W8A8_DYNAMIC"), ("w8a8", "W8A8")])
def test_a_folder_is_laid_out_as_vllm_ascend_reads_it(folders: dict[str, Path], scheme: str, name: str) -> None:
    folder = folders[scheme]
    tree = json.loads((folder / DESCRIPTION).read_text())
    assert tree["model_quant_type"] == name and tree["version"] == "1.0.0"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key for key in tree if "." in key} == index.keys()
    assert tree[f"{Q0}.weight"] == tree["model.layers.1.mlp.down_proj.weight"] == name
    floats = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", f"{Q0}.bias")
    assert {tree[key] for key in floats} == {"FLOAT"}
    own = _tensors(folder)
    expected = {"weight": (torch.int8, (32, 32)), "weight_scale": (torch.float32, (32, 1))}
    expected |= {"weight_offset": (torch.float32, (32, 1)), "bias": (torch.float32, (32,))}
    if scheme == "w8a8":
        expected |= {"input_scale": (torch.float32, (1,)), "input_offset": (torch.float32, (1,))}
        expected |= {"deq_scale": (torch.float32, (32,)), "quant_bias": (torch.int32, (32,))}
    found = {k.removeprefix(f"{Q0}."): (t.dtype, tuple(t.shape)) for k, t in own.items() if k.startswith(f"{Q0}.")}
    assert found == expected
    assert not own[f"{Q0}.weight_offset"].any()
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.py"))


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_fp16_models_store_the_bits_of_deq_scale(folders: dict[str, Path]) -> None:
    stored = _tensors(folders["w8a8_half"])[f"{Q0}.deq_scale"]
    assert stored.dtype == torch.int64
    read = load(folders["w8a8_half"])
    assert torch.equal(stored, w8a8.float32_bits(read["layers.0.qkv_proj.deq_scale"][:32]))
    product = read["layers.0.qkv_proj.input_scale"] * read["layers.0.qkv_proj.weight_scale"]
    assert torch.equal(read["layers.0.qkv_proj.deq_scale"], product)


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_shares_of_two_ranks_reassemble(folders: dict[str, Path], scheme: str) -> None:
    whole = load(folders[scheme])
    ranks = [load(folders[scheme], rank, 2) for rank in range(2)]
    assert all(tensor.is_contiguous() for rank in ranks for tensor in rank.values())
    for name, tensor in whole.items():
        kind, suffix = name.split(".")[2:]
        if kind in ("o_proj", "down_proj"):
            if suffix in ("bias", "quant_bias"):
                assert name not in ranks[1]
            parts = [rank[name] for rank in ranks if name in rank]
            assert torch.equal(torch.cat(parts, dim=1) if suffix == "weight" else parts[0], tensor)
        elif suffix not in ("input_scale", "input_offset"):
            sizes = [16, 8, 8] if kind == "qkv_proj" else [24, 24]
            shares = [rank[name].split(sizes) for rank in ranks]
            assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(*shares, strict=True)]), tensor)
    x = torch.randint(-128, 128, (3, HIDDEN), dtype=torch.int8)
    halves = [
        w8a8.int8_matmul(part, rank["layers.0.o_proj.weight"]) for part, rank in zip(x.chunk(2, 1), ranks, strict=True)
    ]
    assert torch.equal(halves[0] + halves[1], w8a8.int8_matmul(x, whole["layers.0.o_proj.weight"]))


def test_the_loader_gets_the_rest_in_floats(folders: dict[str, Path]) -> None:
    source = floats_of(folders["w8a8_dynamic"])
    original = float_tensors()
    assert {name for name in original if "norm" in name or "embed" in name or "head" in name} == set(source.names())
    for name in source.names():
        assert torch.equal(source.read(name), original[name]) and source.shape(name) == original[name].shape
    assert torch.equal(source.read("lm_head.weight", (slice(0, 4), slice(None))), original["lm_head.weight"][:4])


def test_older_exports_are_read(copy: Callable[[str], Path], folders: dict[str, Path]) -> None:
    folder = copy("w8a8")
    (folder / DESCRIPTION).rename(folder / "quant_model_description_w8a8.json")

    def as_msmodelslim_exports(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("weight_scale", "weight_offset"))]:
            del tensors[name]  # static exports have only the product of both scales
        for name in [name for name in tensors if name.endswith("layernorm.weight")]:
            for copied in (name.replace("norm.weight", "norm.bias"), name.replace("norm.", "norm.module.")):
                tensors[copied] = torch.zeros(HIDDEN) if copied.endswith("bias") else tensors[name].clone()

    edit_tensors(folder, as_msmodelslim_exports)
    (folder / "model.safetensors").rename(folder / "quant_model_weight_w8a8.safetensors")
    names = _tensors(folder)
    edit_json(folder / "quant_model_description_w8a8.json", lambda tree: _describe_again(tree, set(names)))
    assert is_quantized_folder(folder)
    old, new = load(folder), load(folders["w8a8"])
    assert old.keys() == new.keys()
    for name in old:
        assert torch.allclose(old[name].float(), new[name].float(), rtol=1e-6)
    assert not any("bias" in name or "module" in name for name in floats_of(folder).names())


def _describe_again(tree: dict[str, Any], names: set[str]) -> None:
    for key in [key for key in tree if "." in key and key not in names]:
        del tree[key]
    for name in names - tree.keys():
        tree[name] = "W8A8" if ".module." in name else "FLOAT"


def test_a_float_folder_is_not_quantized(folders: dict[str, Path]) -> None:
    assert not is_quantized_folder(folders["float"]) and is_quantized_folder(folders["w8a8"])
    with pytest.raises(QuantizationError, match="the folder is not quantized"):
        read_description(folders["float"])


def test_ranks_must_share_heads_evenly(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide 4 heads"):
        load(folders["w8a8"], 0, 3)


Damage = Callable[[Path], object]


def describe(**changes: Any) -> Damage:
    """Set entries of the description; None removes one."""

    def edit(tree: dict[str, Any]) -> None:
        tree.update(changes)
        for key in [key for key in changes if changes[key] is None]:
            del tree[key]

    return lambda folder: edit_json(folder / DESCRIPTION, edit)


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Change a tensor, or add one, and leave the description; None removes it."""

    def edit(tensors: dict[str, Tensor]) -> None:
        made = change(tensors.pop(name, torch.zeros(1)))
        if made is not None:
            tensors[name] = made.contiguous()

    return lambda folder: edit_tensors(folder, edit)


def without(name: str) -> Damage:
    """Remove a tensor and its entry."""
    return both(describe(**{name: None}), tensor(name, lambda _: None))


def with_tensor(name: str, scheme: str, size: int) -> Damage:
    return both(describe(**{name: scheme}), tensor(name, lambda _: torch.ones(size)))


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def config(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", lambda tree: tree.update(changes))


def text(content: str) -> Damage:
    return lambda folder: (folder / DESCRIPTION).write_text(content)


def two_descriptions(folder: Path) -> None:
    shutil.copy(folder / DESCRIPTION, folder / "quant_model_description_a.json")
    (folder / DESCRIPTION).rename(folder / "quant_model_description_b.json")


def truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])


NORM_BIAS = "model.layers.0.input_layernorm.bias"
OF_V0 = [f"{V0}.{suffix}" for suffix in ("weight", "weight_scale", "weight_offset")]
REFUSED_DESCRIPTIONS = [
    ("W8A8", text("{,"), f"{DESCRIPTION}: not valid JSON"),
    ("W8A8", text("[]"), "expected an object"),
    ("W8A8", text("{}"), "names no tensor"),
    ("W8A8", two_descriptions, "remove the one that is old"),
    ("W8A8", describe(model_quant_type="W4A8_DYNAMIC"), "model_quant_type: scheme 'W4A8_DYNAMIC' is not supported"),
    ("W8A8", describe(**{f"{Q0}.weight": "W4A8"}), f"{Q0}.weight: scheme 'W4A8' is not supported"),
    ("W8A8", describe(metadata={"quarot": {}}), "metadata.quarot"),
    ("W8A8", describe(**{f"{K0}.deq_scale": None}), f"'{K0}.deq_scale' is in the files but not described"),
    ("W8A8", without(f"{K0}.weight"), f"'{K0}.weight' is missing"),
    ("W8A8", without(f"{K0}.deq_scale"), f"'{K0}.deq_scale' is missing"),
    ("W8A8_DYNAMIC", describe(**dict.fromkeys(OF_V0, "FLOAT")), "layers.0.qkv_proj mixes schemes .*v_proj FLOAT"),
    ("W8A8_DYNAMIC", describe(**{f"{V0}.weight_scale": "W8A8"}), "but its weight is W8A8_DYNAMIC"),
    ("W8A8", describe(**{"lm_head.weight": "W8A8"}), "'lm_head.weight' is W8A8; only the linears"),
    ("W8A8", with_tensor(f"{K0}.kv_cache_scale", "W8A8", 1), "kv_cache_scale is not part of W8A8"),
    ("W8A8", config(num_hidden_layers=1), "config.json has 1 layers"),
    ("W8A8", config(num_hidden_layers=3), "'model.layers.2.self_attn.q_proj.weight' is missing"),
    ("W8A8", describe(**{"model.layers.0.x\ny" * 99: "FLOAT"}), "a tensor has no proper name"),
    ("W8A8", describe(**{f"{Q0}.weight": ["x\n"] * 10**4}), f"{Q0}.weight: scheme .* is not supported"),
    ("W8A8", describe(model_quant_type="x\n" * 10**4), "model_quant_type: scheme 'x.n.*' is not supported"),
]
REFUSED_TENSORS = [
    ("W8A8", tensor(f"{K0}.deq_scale", lambda _: None), f"'{K0}.deq_scale' is described but in no file"),
    ("W8A8_DYNAMIC", without(f"{V0}.bias"), "qkv_proj: only some parts have bias"),
    ("W8A8", with_tensor(NORM_BIAS, "FLOAT", HIDDEN), f"{NORM_BIAS}: the model's norms have no bias"),
    ("W8A8", tensor(f"{Q0}.weight", lambda t: t.float()), f"{Q0}.weight: dtype float32, expected int8"),
    ("W8A8", tensor(f"{Q0}.deq_scale", lambda t: t.half()), f"{Q0}.deq_scale: dtype float16"),
    ("W8A8", tensor(f"{Q0}.quant_bias", lambda t: t.long()), f"{Q0}.quant_bias: dtype int64, expected int32"),
    ("W8A8", tensor(f"{Q0}.weight", lambda t: t[:, :-1]), r"weight: shape \[32, 31\], but .* makes it \[32, 32\]"),
    ("W8A8_DYNAMIC", tensor(f"{Q0}.weight_scale", lambda t: t.expand(-1, 4)), r"weight_scale: shape \[32, 4\]"),
    ("W8A8", tensor(f"{Q0}.input_scale", lambda t: t.expand(3)), r"input_scale: shape \[3\]"),
    ("W8A8_DYNAMIC", tensor(f"{Q0}.weight_offset", lambda t: t + 1), f"{Q0}.weight_offset: weights with an offset"),
    ("W8A8_DYNAMIC", tensor(f"{Q0}.weight_scale", lambda t: t * torch.inf), "holds negative, infinite or NaN scales"),
    ("W8A8_DYNAMIC", tensor(f"{Q0}.bias", lambda t: t * torch.nan), f"{Q0}.bias: holds NaN or infinite values"),
    ("W8A8_DYNAMIC", tensor(f"{Q0}.weight_scale", lambda t: t * torch.nan), "holds negative, infinite or NaN scales"),
    ("W8A8", tensor(f"{Q0}.input_scale", lambda t: t * torch.inf), f"{Q0}.deq_scale: it is not input_scale"),
    ("W8A8", tensor(f"{Q0}.deq_scale", lambda t: t.long() - 1), "not the bits of positive fp32 numbers"),
    ("W8A8", tensor(f"{Q0}.deq_scale", lambda t: t * 2), "is not input_scale [*] weight_scale"),
    ("W8A8", tensor(f"{Q0}.input_offset", lambda t: t + 0.5), "make no int8"),
    ("W8A8", tensor(f"{V0}.input_offset", lambda t: t + 1), "qkv_proj: parts differ in input_offset"),
    ("W8A8_DYNAMIC", truncate, "model-00001-of-.*: truncated or not safetensors"),
    ("W8A8_DYNAMIC", lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "model-00002-of.* is missing"),
]


@pytest.mark.parametrize("scheme, damage, message", [*REFUSED_DESCRIPTIONS, *REFUSED_TENSORS])
def test_a_corrupt_folder_is_refused_by_key(
    copy: Callable[[str], Path], scheme: str, damage: Damage, message: str
) -> None:
    folder = copy(scheme.lower())
    damage(folder)
    with pytest.raises(QuantizationError, match=message) as caught:
        load(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_layers_have_one_name_each() -> None:
    layout = Layout((), 1, "model.layers.{i}.", 1, 1, 1)
    assert layout.layer_of("model.layers.0.mlp.up_proj.weight") == 0
    for number in ("00", "٣", "-1", "9" * 5000, ""):
        assert layout.layer_of(f"model.layers.{number}.mlp.up_proj.weight") is None
