"""The files of the checkpoint folder, in the names and layout that Dream's have; weights of any model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from .recipe import Recipe
from .tokenizer import EOS, MASK, special_ids

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def save_weights(model: nn.Module, out: Path) -> None:
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    partial = out / "model.safetensors.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


def save_settings(recipe: Recipe, tokenizer: Tokenizer, out: Path) -> None:
    eos_id, mask_id = special_ids(tokenizer)
    config = {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_act": "silu", "attention_dropout": 0.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": None,
        "vocab_size": recipe.vocabulary, "hidden_size": recipe.hidden, "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads, "max_position_embeddings": 512, "rope_theta": recipe.rope_theta,
        "rms_norm_eps": recipe.norm_eps, "mask_token_id": mask_id, "pad_token_id": eos_id, "eos_token_id": eos_id,
    }  # fmt: skip
    write_json(out / "config.json", config)
    ids = {"eos_token_id": eos_id, "pad_token_id": eos_id, "mask_token_id": mask_id}
    write_json(out / "generation_config.json", ids)
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokenizer.model.save(str(out))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "errors": "replace", "split_special_tokens": False, "model_max_length": 512, "bos_token": None,
        "eos_token": EOS, "pad_token": EOS, "mask_token": MASK, "unk_token": None, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {str(eos_id): {"content": EOS, **special}, str(mask_id): {"content": MASK, **special}},
    })  # fmt: skip


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
