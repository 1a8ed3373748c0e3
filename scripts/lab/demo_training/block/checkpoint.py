"""The checkpoint folder in SDAR's names and layout: its settings, and loading it again as a teacher.

The folder holds no code, so config.json has no `auto_map`. Weights are written by `demo_training.checkpoint`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo_training.checkpoint import write_json
from demo_training.tokenizer import special_ids

from .model import BlockDiffusion
from .recipe import BLOCK, BlockRecipe

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
SIZES = {
    "vocabulary": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size",
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip


def require_files(folder: Path, names: tuple[str, ...], option: str) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"{option} {folder}: no {', '.join(missing)} there; name a folder that has them.")


def load_tokenizer(folder: Path, recipe: BlockRecipe) -> Tokenizer:
    require_files(folder, TOKENIZER_FILES, "--tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.get_vocab_size() != recipe.vocabulary:
        raise SystemExit(
            f"--tokenizer {folder}: {tokenizer.get_vocab_size()} tokens, but the model has {recipe.vocabulary}; "
            "name the folder of the demo checkpoint."
        )
    return tokenizer


def save_block_settings(recipe: BlockRecipe, tokenizer: Tokenizer, tokenizer_folder: Path, out: Path) -> None:
    """config.json, generation_config.json and the tokenizer's files with its chat template."""
    eos_id, mask_id = special_ids(tokenizer)
    config = {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": recipe.layers,
        "initializer_range": 0.02, "rope_scaling": None, "max_position_embeddings": 512, "block_size": BLOCK,
        **{key: getattr(recipe, name) for name, key in SIZES.items()},
        "mask_token_id": mask_id, "pad_token_id": eos_id, "bos_token_id": eos_id, "eos_token_id": eos_id,
    }  # fmt: skip
    if recipe.experts:
        config |= {
            "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "num_experts": recipe.experts,
            "num_experts_per_tok": recipe.active_experts, "moe_intermediate_size": recipe.expert_width,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    write_json(out / "config.json", config)
    ids = {"eos_token_id": eos_id, "pad_token_id": eos_id, "mask_token_id": mask_id}
    write_json(out / "generation_config.json", ids)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer_folder / name, out / name)


def load_block_model(folder: Path, recipe: BlockRecipe) -> BlockDiffusion:
    """The saved weights in float32, in a model of the folder's sizes and otherwise of `recipe`."""
    require_files(folder, ("config.json", "model.safetensors"), "--teacher")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "sdar":
        raise SystemExit(
            f"--teacher {folder}: model_type is {config.get('model_type')!r}, not 'sdar'; name such a model."
        )
    model = BlockDiffusion(replace(recipe, **{name: config[key] for name, key in SIZES.items()}))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    return model
