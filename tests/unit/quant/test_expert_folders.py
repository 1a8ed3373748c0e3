"""8-bit folders of mixtures of experts: cut for ranks, with shared experts in 8 bits too, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_quant_folders import edit_json, edit_tensors, floats_of, layout_of, load, quantize
from torch import Tensor

from quant import w8a8
from quant.errors import QuantizationError
from quant.folder import schemes_of

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests/golden_families/llada2_2/model_a"
DESCRIPTION = "quant_model_description.json"
EXPERT, SHARED = "model.layers.1.mlp.experts.2.up_proj", "model.layers.1.mlp.shared_experts.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quantize(MODEL, tmp_path / "out")
    return tmp_path / "out"


def float_tensors() -> dict[str, Tensor]:
    return {name: tensor for path in MODEL.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_8_bits(folder: Path, module: str, scheme: str = "W8A8_DYNAMIC") -> Tensor:
    """Quantize one more of the folder's linears; return what it stands for."""

    def edit(tensors: dict[str, Tensor]) -> None:
        values, scale = w8a8.quantize_weight(tensors[f"{module}.weight"].float())
        tensors |= {f"{module}.weight": values, f"{module}.weight_scale": scale[:, None]}

    edit_tensors(folder, edit)
    names = (f"{module}.weight", f"{module}.weight_scale")
    edit_json(folder / DESCRIPTION, lambda tree: tree.update(dict.fromkeys(names, scheme)))
    values, scale = w8a8.quantize_weight(float_tensors()[f"{module}.weight"].float())
    return values * scale[:, None]


def test_ranks_share_whole_experts(folder: Path) -> None:
    whole, ranks = load(folder), [load(folder, rank, 2) for rank in range(2)]
    for name in ("layers.1.moe.experts_gate_up", "layers.1.moe.experts_down"):
        for leaf, num_dimensions in (("weight", 3), ("weight_scale", 2)):
            parts = [rank[f"{name}.{leaf}"] for rank in ranks]
            assert parts[0].dim() == num_dimensions and torch.equal(torch.cat(parts), whole[f"{name}.{leaf}"])
    gate_up = (
        whole["layers.1.moe.experts_gate_up.weight"][2] * whole["layers.1.moe.experts_gate_up.weight_scale"][2, :, None]
    )
    exact = float_tensors()[f"{EXPERT}.weight"].float()
    assert (gate_up[len(exact) :] - exact).abs().max() <= whole["layers.1.moe.experts_gate_up.weight_scale"].max() / 2


def test_routers_and_shared_experts_stay_float(folder: Path) -> None:
    schemes = schemes_of(folder, layout_of(MODEL))
    assert {scheme for name, scheme in schemes.items() if ".moe.shared_" in name} == {"FLOAT"}
    assert {scheme for name, scheme in schemes.items() if ".moe.shared_" not in name} == {"W8A8_DYNAMIC"}
    names = floats_of(folder).names()
    assert {f"{SHARED}.weight", "model.layers.1.mlp.gate.weight"} <= set(names)
    assert not any(".experts." in name for name in names)


def test_shared_experts_in_8_bits_are_read_as_floats(folder: Path) -> None:
    expected = in_8_bits(folder, SHARED)
    source = floats_of(folder)
    assert f"{SHARED}.weight_scale" not in source.names()
    assert torch.equal(source.read(f"{SHARED}.weight"), expected)
    slices = slice(1, 5), slice(2, 4)
    assert torch.equal(source.read(f"{SHARED}.weight", slices), expected[slices])


def test_experts_can_be_left_out(tmp_path: Path) -> None:
    quantize(MODEL, tmp_path / "out", exclude=["*.mlp.experts.*"])
    assert f"{EXPERT}.weight" in floats_of(tmp_path / "out").names()
    assert {name.split(".")[2] for name in load(tmp_path / "out")} == {
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    }


def test_what_experts_cannot_have_is_refused(folder: Path, tmp_path: Path) -> None:
    def as_float(tree: dict[str, object]) -> None:
        for leaf in ("weight", "weight_scale", "weight_offset"):
            tree[f"{EXPERT}.{leaf}"] = "FLOAT"

    edit_json(folder / DESCRIPTION, as_float)
    with pytest.raises(QuantizationError, match=r"layers\.1\.moe\.experts_gate_up mixes schemes \(.* FLOAT\)"):
        load(folder)
    quantize(MODEL, tmp_path / "static")
    edit_json(tmp_path / "static" / DESCRIPTION, lambda tree: tree.update({f"{SHARED}.weight": "W8A8"}))
    with pytest.raises(QuantizationError, match=r"layers\.1\.moe\.shared_down_proj is W8A8, with static inputs"):
        load(tmp_path / "static")
