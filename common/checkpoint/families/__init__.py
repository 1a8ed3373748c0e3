"""What a checkpoint's config.json says about its model: the first file every load reads.

Code beside the config.json (`auto_map`) is never imported: a family is supported when it has a reader in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from common.checkpoint.families.dense import read_dream, read_fast_dllm_v2, read_llada, read_sdar, read_stable_diffcoder
from common.checkpoint.families.experts import read_llada2_moe, read_sdar_moe
from common.checkpoint.families.fields import Fields
from common.checkpoint.families.quantized import check_unquantized
from common.checkpoint.folder import existing_folder, has_file, read_json_object, shown
from common.checkpoint.model_config import ModelConfig
from common.errors import ConfigError

FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "Dream": read_dream,
    "DreamModel": read_dream,
    "llada": read_llada,
    "LLaDAModelLM": read_llada,
    "sdar": read_sdar,
    "SDARForCausalLM": read_sdar,
    "sdar_moe": read_sdar_moe,
    "SDARMoeForCausalLM": read_sdar_moe,
    "Fast_dLLM_Qwen": read_fast_dllm_v2,
    "Fast_dLLM_QwenForCausalLM": read_fast_dllm_v2,
    "llada2_moe": read_llada2_moe,
    "LLaDA2MoeModelLM": read_llada2_moe,
    "StableDiffcoderForCausalLM": read_stable_diffcoder,  # whose model_type is llama
}


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json, and what it does not say from files beside it. Raises ConfigError: file, key, fix."""
    path = existing_folder(folder) / "config.json"
    _check_no_adapter(path)
    fields = Fields(path)
    check_unquantized(path, fields.tree)
    fields.only("transformers_weights", None, "model.safetensors")
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    for name in [model_type, *(architectures if isinstance(architectures, list) else [])]:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name](fields)
    raise ConfigError(
        f"{fields.path}: model_type: {shown(model_type)} is not a supported family; supported are "
        f"{', '.join(FAMILIES)} (docs/families.md lists checkpoints)"
    )


def _check_no_adapter(path: Path) -> None:
    adapter = path.with_name("adapter_config.json")
    if has_file(adapter) and not has_file(path):
        base = read_json_object(adapter).get("base_model_name_or_path")
        raise ConfigError(
            f"{adapter.parent}: a LoRA, not a model: set `lora_path` to it and `model` to the folder of its base "
            f"({shown(base)})"
        )
