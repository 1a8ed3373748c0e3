"""Statistics of an automaton's classes from a shard's logits, and those of a position from those of all shards.

Tokens lie sorted by class in tiles of equal length, so that a class is reduced by two reductions of a last dimension,
which every device has, and in an order that depends on nothing else in the pass.

Shapes: N positions, V the shard's vocabulary, C classes, K tiles, B tokens of a tile, X tiles of a class, P shards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import Int, Sampling
from common.model import NEVER, SamplingRows, gumbel_noise

_MOST_VALUES = 1 << 26  # of a tensor: 256 MiB, a few of which are there at once
_SCORE = 5  # of the class's token, which the shards are compared by; after ClassField


class Tiles(NamedTuple):
    """A shard's tokens by class, int32. Places without a token hold V, those without a tile K. first_1C: the first tile
    of each class, and K: a class's tiles follow one another."""

    token_KB: Tensor
    tile_CX: Tensor
    first_1C: Tensor

    @classmethod
    def of(cls, class_V: Int, num_classes: int, device: torch.device) -> Tiles:
        size, order_V = 1 << (len(class_V).bit_length() // 2), class_V.argsort(kind="stable")
        count_C = np.bincount(class_V, minlength=num_classes)
        num_tiles_C = -(-count_C // size)
        first_C = num_tiles_C.cumsum() - num_tiles_C
        token_KB = np.full((max(1, int(num_tiles_C.sum())), size), len(class_V), np.int32)
        rank_V = np.arange(len(class_V)) - (count_C.cumsum() - count_C)[class_V[order_V]]
        token_KB.reshape(-1)[first_C[class_V[order_V]] * size + rank_V] = order_V
        tile_CX = (first_C[:, None] + np.arange(max(1, int(num_tiles_C.max())))).astype(np.int32)
        tile_CX[tile_CX >= (first_C + num_tiles_C)[:, None]] = len(token_KB)
        first_1C = np.append(first_C, first_C[-1] + num_tiles_C[-1]).astype(np.int32)
        return cls(*(torch.from_numpy(array).to(device) for array in (token_KB, tile_CX, first_1C)))

    def tiled(self, values_NV: Tensor) -> Tensor:
        """Return the values sorted into tiles, [N, K, B]."""
        return _selected(values_NV, self.token_KB)

    def by_class(self, values_NK: Tensor) -> Tensor:
        """Return the values of tiles by class, [N, C, X]."""
        return _selected(values_NK, self.tile_CX)


def class_statistics(
    logits_NV: Tensor, vocab_start: int, tiles: Tiles, sampling: Sampling, rows: SamplingRows | None
) -> Tensor:
    """[N, C, 6] float32 of a shard: `common.decoding.ClassField`, and the score that the class's token won by. rows:
    how each position is drawn; None: all take the most probable token. top_p and top_k are not looked at."""
    most = max(1, _MOST_VALUES // tiles.token_KB.numel())
    if len(logits_NV) > most:
        parts = torch.split(logits_NV, most)
        rows_of = [None] * len(parts) if rows is None else map(SamplingRows, *(torch.split(one, most) for one in rows))
        found = [
            class_statistics(part, vocab_start, tiles, sampling, own) for part, own in zip(parts, rows_of, strict=True)
        ]
        return torch.cat(found)
    logits_NV = logits_NV.float()
    column = sampling.mask_token_id - vocab_start
    if 0 <= column < logits_NV.shape[1]:
        logits_NV[:, column].fill_(NEVER)
    drawn_NV = score_NV = logits_NV
    if rows is not None:
        drawn_NV = logits_NV / rows.temperature_N[:, None]
        noise_NV = gumbel_noise(rows, vocab_start, logits_NV.shape[1])
        score_NV = torch.addcmul(drawn_NV, noise_NV, rows.noise_N[:, None], value=-1)
        logits_NV = drawn_NV if sampling.tempers_confidence else logits_NV
    best_NK, place_NK = tiles.tiled(score_NV).max(dim=-1)
    best_NC, tile_NC = tiles.by_class(best_NK).max(dim=-1)
    tile_NC = tiles.tile_CX.long().expand(len(best_NC), -1, -1).gather(2, tile_NC[..., None])[..., 0]
    tile_NC = tile_NC.clamp(max=tiles.token_KB.shape[0] - 1)
    token_NC = tiles.token_KB.reshape(-1).long()[tile_NC * tiles.token_KB.shape[1] + place_NK.gather(1, tile_NC)]
    logit_NC = _padded(logits_NV).gather(1, token_NC)
    mass_NK, mean_NK = _reduced(tiles.tiled(logits_NV))
    mass_NC, mean_NC = _reduced(tiles.by_class(mass_NK), tiles.by_class(mean_NK))
    weight_NC = logit_NC
    if rows is not None:
        drawn_NC = mass_NC
        if not sampling.tempers_confidence:
            drawn_NC, _ = _reduced(tiles.by_class(_reduced(tiles.tiled(drawn_NV))[0]))
        weight_NC = torch.where(rows.noise_N[:, None] > 0, drawn_NC, logit_NC)
    values = (token_NC.float() + vocab_start, logit_NC, weight_NC, mass_NC, mean_NC, best_NC)
    return torch.stack(values, dim=-1)


def merge_classes(statistics_PNC6: Tensor, rows: SamplingRows | None) -> Tensor:
    """[N, C, 5]: `common.decoding.ClassField` of all shards together; ties go to the lower id."""
    if len(statistics_PNC6) == 1:
        return statistics_PNC6[0, ..., :_SCORE]
    shard_1NC = statistics_PNC6[..., _SCORE].max(dim=0, keepdim=True).indices
    token_NC, logit_NC = (statistics_PNC6[..., one].gather(0, shard_1NC)[0] for one in range(2))
    weight_PNC, mass_PNC, mean_PNC = (statistics_PNC6[..., one] for one in range(2, 5))
    mass_NC, mean_NC = _reduced(mass_PNC.permute(1, 2, 0), mean_PNC.permute(1, 2, 0))
    weight_NC = logit_NC
    if rows is not None:
        sampled_NC, _ = _reduced(weight_PNC.permute(1, 2, 0))
        weight_NC = torch.where(rows.noise_N[:, None] > 0, sampled_NC, logit_NC)
    return torch.stack((token_NC, logit_NC, weight_NC, mass_NC, mean_NC), dim=-1)


def _reduced(values: Tensor, means: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log sum exp over the last dimension, and the mean of `means`, or of the values, by these weights."""
    top = values.max(dim=-1, keepdim=True).values
    weight = (values - top).exp()
    total = weight.sum(dim=-1)
    mean = (weight * (values if means is None else means)).sum(dim=-1) / total
    return top[..., 0] + total.log(), mean


def _padded(values: Tensor) -> Tensor:
    """The values and one more column, of what never happens."""
    return torch.cat((values, values.new_full((len(values), 1), NEVER)), dim=1)


def _selected(values: Tensor, index: Tensor) -> Tensor:
    return _padded(values).index_select(1, index.reshape(-1)).view(len(values), *index.shape)
