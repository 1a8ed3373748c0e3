"""Checks whether a model can be decoded by the settings of a run, before its weights are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.checkpoint import ModelConfig, load_model_config
from common.config import DecodeConfig, DeviceProfile, Levenshtein, RunConfig
from common.decoding import Sampling, why_not_routed
from common.errors import ConfigError, placed
from common.processes import resolve_mesh

logger = logging.getLogger(__name__)


def longest_request(profile: DeviceProfile, model: ModelConfig) -> int:
    """Return the most positions that a request may have, prompt and answer together."""
    return min(profile.max_model_len, model.max_position_embeddings)


def check_settings(settings: Mapping[str, DecodeConfig], profile: DeviceProfile, run: RunConfig) -> None:
    """Check each of several settings, by its row's name, against the run's model. Raises ConfigError naming the row."""
    if not settings:
        return
    model = load_model_config(run.model)
    for name, decode in settings.items():
        with placed(f"row {name!r}"):
            check_decode(decode, profile, model)


def check_decode(decode: DecodeConfig, profile: DeviceProfile, model: ModelConfig) -> None:
    """Check settings against the model. Raises ConfigError."""
    for name, token_id in (("mask_token_id", decode.mask_token_id), ("eos_token_id", decode.eos_token_id)):
        if token_id is not None and not 0 <= token_id < model.vocab_size:
            raise ConfigError(f"decode.{name} {token_id} is no token: the model's vocabulary has {model.vocab_size}")
    mask = model.mask_of(decode.mask_token_id)
    if mask == (model.eos_token_id if decode.eos_token_id is None else decode.eos_token_id):
        raise ConfigError(
            f"decode.mask_token_id and decode.eos_token_id are both {mask}: a text would end at its first mask; remove "
            "one of them, the checkpoint has its own"
        )
    for token_id in decode.stop_token_ids:
        if token_id >= model.vocab_size or token_id == mask:
            what = "the mask token" if token_id == mask else f"no token: the model's vocabulary has {model.vocab_size}"
            raise ConfigError(f"decode.stop_token_ids: {token_id} is {what}; remove it")
    check_strategy(decode, model)
    if Sampling.of(decode, mask).is_special and profile.engine != "lopa_cuda":
        raise ConfigError(
            "cfg_scale, penalty_lambda, mask_probability counted and any sampling_strategy but default, margin and "
            "neg_entropy are of lopa_cuda: remove them, or use its profile"
        )
    if decode.strategy.guidance and resolve_mesh(profile).branch_parallel_size > 1:
        raise ConfigError("cfg_scale: a row and the one that guides it need one rank; set branch_parallel_size to 1")
    if decode.max_new_tokens >= longest_request(profile, model):
        raise ConfigError(
            f"decode.max_new_tokens {decode.max_new_tokens} leaves no room for a prompt: the model has "
            f"{model.max_position_embeddings} positions, the profile's max_model_len is {profile.max_model_len}"
        )


def check_strategy(decode: DecodeConfig, model: ModelConfig) -> None:
    """Check the strategy against how the model was trained: where blocks are counted from, and what predicts a
    position.

    Another block size than the config's is logged, and no error. Raises ConfigError.
    """
    is_from_zero = decode.strategy.is_from_zero
    if is_from_zero != (model.block_origin == "zero"):
        counted = "position 0" if model.block_origin == "zero" else "the prompt's end"
        fitting = "fast_dllm_v2" if model.shift else "block_diffusion"
        fitting = f"{fitting} (or a preset of configs/presets)" if model.block_origin == "zero" else "d2f or fast_dllm"
        raise ConfigError(
            f"decode.strategy {decode.strategy.name}: the model's blocks ({model.family}) are counted from {counted}: "
            f"set it to {fitting}"
        )
    if is_from_zero and (decode.strategy.name == "fast_dllm_v2") != (model.shift == 1):
        side = "the position before it" if model.shift else "itself"
        fitting = "fast_dllm_v2" if model.shift else "block_diffusion"
        raise ConfigError(
            f"decode.strategy {decode.strategy.name}: this model ({model.family}) predicts a position from {side}: "
            f"set it to {fitting}"
        )
    if isinstance(decode.strategy, Levenshtein):
        _check_edit_ids(decode.strategy, model)
    elif model.edit_ids is not None:
        logger.warning(
            "decode.strategy %s takes the tokens %d and %d, by which this model deletes and inserts, for text: set it "
            "to levenshtein",
            decode.strategy.name, *model.edit_ids,
        )  # fmt: skip
    if (reason := why_not_routed(decode, model.routing_block)) is not None:
        raise ConfigError(f"decode.block_size: {reason}")
    if is_from_zero and model.block_size not in (None, decode.block_size):
        logger.warning(
            "decode.block_size is %d, the model was trained with blocks of %d: set it to %d",
            decode.block_size, model.block_size, model.block_size,
        )  # fmt: skip


def _check_edit_ids(strategy: Levenshtein, model: ModelConfig) -> None:
    if strategy.delete_token_id is None or strategy.split_token_id is None:
        if model.edit_ids is None:
            raise ConfigError(
                "decode.strategy levenshtein: the checkpoint's config.json names no tokens that delete and insert "
                "(delete_token_id, split_token_id): set it to block_diffusion, or set both in it"
            )
        return
    for token_id in (strategy.delete_token_id, strategy.split_token_id):
        if token_id >= model.vocab_size:
            raise ConfigError(
                f"decode.strategy levenshtein: {token_id} is no token: the model's vocabulary has {model.vocab_size}"
            )
