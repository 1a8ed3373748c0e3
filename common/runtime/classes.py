"""What a pass predicts of classes of tokens, for requests whose answers are held to a format: plain operators over the
logits of these requests' rows, in no graph, after the head. Passes without such requests do nothing here.

Tokens lie sorted by class in tiles of equal length, so that a class is reduced by two reductions of a last dimension,
which every device has, and in an order that depends on nothing else in the pass. A vocabulary-parallel rank reduces its
shard, and the shards' numbers are merged.

Cost: another pass of the head, and about six reads and writes of the logits of these rows, 64 positions at a time.

Shapes: N positions, V the shard's vocabulary, C classes, K tiles, B tokens of a tile, X tiles of a class, P shards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.constraints import Automaton
from common.decoding import ClassStatistics, Int, Sampling, StepPlan
from common.model import NEVER, SamplingRows, gumbel_noise, sampling_fields
from common.runtime.collectives import Collectives
from common.runtime.logprobs import Shares

_AT_ONCE = 64  # positions
_MOST_KEPT = 64  # automata whose tiles stay on the device
_SCORE = 5  # of the class's token, which the shards are compared by; after ClassField


class Tiles(NamedTuple):
    """A shard's tokens by class. Places without a token hold V, those without a tile K."""

    token_KB: Tensor
    tile_CX: Tensor

    @classmethod
    def of(cls, class_V: Int, num_classes: int, device: torch.device) -> Tiles:
        size, order_V = 1 << (len(class_V).bit_length() // 2), class_V.argsort(kind="stable")
        count_C = np.bincount(class_V, minlength=num_classes)
        num_tiles_C = -(-count_C // size)
        first_C = num_tiles_C.cumsum() - num_tiles_C
        token_KB = np.full((max(1, int(num_tiles_C.sum())), size), len(class_V), np.int64)
        rank_V = np.arange(len(class_V)) - (count_C.cumsum() - count_C)[class_V[order_V]]
        token_KB.reshape(-1)[first_C[class_V[order_V]] * size + rank_V] = order_V
        tile_CX = first_C[:, None] + np.arange(max(1, int(num_tiles_C.max())))
        tile_CX[tile_CX >= (first_C + num_tiles_C)[:, None]] = len(token_KB)
        return cls(torch.from_numpy(token_KB).to(device), torch.from_numpy(tile_CX).to(device))

    def tiled(self, values_NV: Tensor) -> Tensor:
        """[N, K, B]."""
        return _selected(values_NV, self.token_KB)

    def by_class(self, values_NK: Tensor) -> Tensor:
        """[N, C, X]."""
        return _selected(values_NK, self.tile_CX)


class _Asked(NamedTuple):
    """An automaton's part of a pass. statistics_PNC5: of each branch rank's share of the entries, on the device."""

    key: str
    entry_X: Int
    shares: Shares
    statistics_PNC5: Tensor


class ClassHead:
    """Computes the statistics of a pass: queue them by `launch`, then read them by `receive`."""

    def __init__(self, collectives: Collectives, device: torch.device, vocab_start: int) -> None:
        self._collectives = collectives
        self._device = device
        self._vocab_start = vocab_start
        self._tiles: OrderedDict[str, Tiles] = OrderedDict()
        self._asked: list[_Asked] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._asked)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, entries_of: Sequence[Int], logits_of: Callable[[Int], Tensor]) -> None:
        """Queue the statistics of what the plan holds to formats.

        entries_of: the plan's entries that each branch rank reads. logits_of: returns this rank's shard of the logits
        of reads, by their places among its own.
        """
        self._asked = []
        held, request_T = plan.automaton_of or {}, plan.request_R.repeat(plan.num_entries_R)
        rank = self._collectives.mesh.bp_rank
        for automaton in {automaton.key: automaton for automaton in held.values()}.values():
            requests = [request for request, other in held.items() if other.key == automaton.key]
            entry_X = (np.isin(request_T, requests) & plan.is_read_T).nonzero()[0]
            if len(entry_X):
                shares = Shares(plan.num_tokens, entries_of, entry_X, rank)
                found_NC5 = self._computed(plan, automaton, shares.place_M, entry_X[shares.index_M], logits_of)
                self._asked.append(_Asked(automaton.key, entry_X, shares, self._collectives.bp_stack(found_NC5)))

    def receive(self) -> Mapping[str, ClassStatistics]:
        """Return the statistics of the pass launched last, once the device has come past it."""
        asked, self._asked = self._asked, []
        found = {}
        for key, entry_X, shares, statistics_PNC5 in asked:
            values_PNX = statistics_PNC5.flatten(2).cpu().numpy()
            shape = len(entry_X), *statistics_PNC5.shape[2:]
            found[key] = ClassStatistics(entry_X, shares.in_order(values_PNX).reshape(shape))
        return found

    def _computed(
        self, plan: StepPlan, automaton: Automaton, place_N: Int, entry_N: Int, logits_of: Callable[[Int], Tensor]
    ) -> Tensor:
        """[N, C, 5] of this rank's reads, merged over the shards."""
        found = []
        for begin in range(0, len(place_N), _AT_ONCE):
            own = slice(begin, begin + _AT_ONCE)
            logits_NV = logits_of(place_N[own])
            tiles = self._tiles_of(automaton, logits_NV.shape[1])
            rows = self._sampling_rows(plan, entry_N[own])
            statistics_NC6 = class_statistics(logits_NV, self._vocab_start, tiles, plan.sampling, rows)
            found.append(merge_classes(self._collectives.tp_stack(statistics_NC6), rows))
        return torch.cat(found)

    def _tiles_of(self, automaton: Automaton, num_columns: int) -> Tiles:
        if automaton.key not in self._tiles:
            class_V = np.zeros(num_columns, np.int64)  # padding has no part in any text
            own_V = automaton.class_V[self._vocab_start : self._vocab_start + num_columns]
            class_V[: len(own_V)] = own_V
            self._tiles[automaton.key] = Tiles.of(class_V, automaton.num_classes, self._device)
            if len(self._tiles) > _MOST_KEPT:
                self._tiles.popitem(last=False)
        self._tiles.move_to_end(automaton.key)
        return self._tiles[automaton.key]

    def _sampling_rows(self, plan: StepPlan, entry_N: Int) -> SamplingRows | None:
        if plan.sampling_3R is None:
            return None
        row_N = plan.first_R.searchsorted(entry_N, side="right") - 1
        fields_6N = sampling_fields(
            plan.sampling_3R[:, row_N], plan.noise_key_R[row_N], plan.step_R[row_N], plan.position_T[entry_N] + 1,
            len(entry_N),
        )  # fmt: skip
        return SamplingRows.of(torch.from_numpy(fields_6N).to(self._device))


def class_statistics(
    logits_NV: Tensor, vocab_start: int, tiles: Tiles, sampling: Sampling, rows: SamplingRows | None
) -> Tensor:
    """[N, C, 6] float32 of a shard: `common.decoding.ClassField`, and the score that the class's token won by. rows:
    how each position is drawn; None: all take the most probable token. top_p and top_k are not looked at."""
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
    tile_NC = tiles.tile_CX.expand(len(best_NC), -1, -1).gather(2, tile_NC[..., None])[..., 0]
    tile_NC = tile_NC.clamp(max=tiles.token_KB.shape[0] - 1)
    token_NC = tiles.token_KB.reshape(-1)[tile_NC * tiles.token_KB.shape[1] + place_NK.gather(1, tile_NC)]
    logit_NC = _padded(logits_NV).gather(1, token_NC)
    mass_NK, mean_NK = _reduced(tiles.tiled(logits_NV))
    mass_NC, mean_NC = _reduced(tiles.by_class(mass_NK), tiles.by_class(mean_NK))
    weight_NC = mass_NC
    if rows is not None and not sampling.tempers_confidence:
        weight_NC, _ = _reduced(tiles.by_class(_reduced(tiles.tiled(drawn_NV))[0]))
    values = (token_NC.float() + vocab_start, logit_NC, weight_NC, mass_NC, mean_NC, best_NC)
    return torch.stack(values, dim=-1)


def merge_classes(statistics_PNC6: Tensor, rows: SamplingRows | None) -> Tensor:
    """[N, C, 5]: `common.decoding.ClassField` of all shards together; ties go to the lower id."""
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
