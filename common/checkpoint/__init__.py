"""Checkpoint folders in, what the engine needs out: the model's numbers, this rank's weights, the tokenizer.

Nothing in a folder is executed, but for its chat template in a process of its own. What no model can have is refused by
file and key. `rules` knows both vocabularies of parameters; tensors are read from `sources`.
"""

from common.checkpoint.families import load_model_config
from common.checkpoint.folder import existing_folder
from common.checkpoint.lora import LoraSource
from common.checkpoint.model_config import ModelConfig, MoEConfig
from common.checkpoint.rules import check_tensor_parallel, fits_tensor_parallel, quantizable, shard_bounds
from common.checkpoint.sources import SafetensorsFolder
from common.checkpoint.text_length import CharacterBound, character_bound
from common.checkpoint.tokenizer import Tokenizer, load_tokenizer
from common.checkpoint.weights import load_weights

__all__ = [
    "CharacterBound",
    "LoraSource",
    "MoEConfig",
    "ModelConfig",
    "SafetensorsFolder",
    "Tokenizer",
    "character_bound",
    "check_tensor_parallel",
    "existing_folder",
    "fits_tensor_parallel",
    "load_model_config",
    "load_tokenizer",
    "load_weights",
    "quantizable",
    "shard_bounds",
]
