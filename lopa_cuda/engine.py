"""The CUDA engine, which also runs on CPU: one forward pass a step for this rank's share of the rows.

upload rows -> embed, layers (each pre-writes its window's KV), norm -> head where the scheduler reads -> statistics ->
gather over bp -> read back. After the scheduler has picked winners, `commit` copies their spans into the cache; with full
attention and several branch ranks the winner's owner broadcasts them first (Pre-Write, then Commit-Winner-Cache).
"""

from __future__ import annotations

import platform
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import ConfigError, DeviceProfile, RunConfig
from common.engine import Capacity, EngineError, MissingCapability
from common.launch import Mesh, close_mesh, init_mesh, local_rank
from common.models.config import ModelConfig, load_model_config
from common.models.dream import Dream, build_dream
from common.plan import CommitSpan, Int, Predictions, StepPlan, assign_rows
from common.sampling import NoiseKeys, merge_statistics, sampled_statistics, shard_statistics
from common.weights import load_weights
from lopa_cuda.kv_cache import StaticKVCache
from lopa_cuda.ops import DeviceStep, TorchOps, visible_keys
from lopa_cuda.parallel import Collectives


def build(profile: DeviceProfile, run: RunConfig) -> CudaEngine:
    """Load the run's model onto this process's device. Raises ConfigError or MissingCapability before loading."""
    config = load_model_config(run.model)
    device = _device(profile)
    mesh = init_mesh(profile, "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    dtype = getattr(torch, profile.dtype)
    max_model_len = min(profile.max_model_len, config.max_position_embeddings)
    cache = _build_cache(config, mesh, run.max_num_requests, max_model_len, dtype, device, profile)
    collectives = Collectives(mesh)
    weights = load_weights(
        run.model, config, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, dtype=dtype,
        lora_path=run.lora_path, load_format=run.load_format,
    )  # fmt: skip
    ops = TorchOps(config, cache, collectives, max_model_len)
    model = build_dream(config, ops, weights, tp_rank=mesh.tp_rank, tp_size=mesh.tp_size, device=device)
    return CudaEngine(model, cache, collectives, Capacity(run.max_num_requests, max_model_len), device)


def _device(profile: DeviceProfile) -> torch.device:
    if profile.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MissingCapability(
            f"profile {profile.name} needs a CUDA device and none is visible; use configs/profiles/cpu.yaml"
        )
    if local_rank() >= torch.cuda.device_count():
        raise MissingCapability(
            f"profile {profile.name}: process {local_rank()} of this node has no GPU, {torch.cuda.device_count()} are "
            "visible; start fewer processes a node or make more GPUs visible"
        )
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())


def _build_cache(
    config: ModelConfig, mesh: Mesh, num_slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device,
    profile: DeviceProfile,
) -> StaticKVCache:  # fmt: skip
    per_position = 2 * config.num_layers * config.num_kv_heads // mesh.tp_size * config.head_size * dtype.itemsize
    wanted = per_position * num_slots * max_model_len
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * profile.gpu_memory_utilization)
        if wanted > free:
            raise ConfigError(
                f"the KV cache of {num_slots} requests of {max_model_len} positions needs {wanted / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free on {device}: lower max_num_requests or max_model_len"
            )
    return StaticKVCache(
        num_layers=config.num_layers, num_slots=num_slots, max_model_len=max_model_len,
        num_kv_heads=config.num_kv_heads // mesh.tp_size, head_size=config.head_size, dtype=dtype, device=device,
    )  # fmt: skip


class CudaEngine:
    """common.engine.Engine over one device a process."""

    def __init__(
        self, model: Dream, cache: StaticKVCache, collectives: Collectives, capacity: Capacity, device: torch.device
    ) -> None:
        self.model = model
        self.cache = cache
        self.capacity = capacity
        self.device = device
        self.num_steps = 0
        self._collectives = collectives
        self.mesh = collectives.mesh
        self._row_of: Int = np.zeros((1, 0), dtype=np.int64)  # [bp rank, local row] -> row of the plan

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Predictions:
        self._row_of = assign_rows(plan, self.mesh.bp_size)
        try:
            predicted_PRW3 = self._collectives.bp_stack(self._forward_rows(plan, self._row_of[self.mesh.bp_rank]))
            predicted = predicted_PRW3.cpu().numpy()
        except RuntimeError as error:
            raise EngineError(self._explain(error)) from error
        self.num_steps += 1
        return _in_plan_order(predicted, self._row_of, plan.num_rows)

    @torch.inference_mode()
    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        try:
            if plan.is_block_causal or self.mesh.bp_group is None:
                self._commit_own(plan, winner_row_of_request)
            else:
                self._commit_winner(plan, winner_row_of_request)
        except RuntimeError as error:
            raise EngineError(self._explain(error)) from error

    def describe(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.processor()
        return {
            "engine": "lopa_cuda",
            "device": device or platform.machine(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dtype": str(self.cache.committed.dtype).removeprefix("torch."),
            "mesh": {"dp": self.mesh.dp_size, "bp": self.mesh.bp_size, "tp": self.mesh.tp_size},
            "kv_cache_bytes": self.cache.num_bytes,
        }

    def close(self) -> None:
        close_mesh()

    def _forward_rows(self, plan: StepPlan, rows: Int) -> Tensor:
        """[Rl, W, 3] float32: token, probability, confidence after every read entry of this rank's rows."""
        step, token_RW = self._upload(plan, rows)
        self.cache.reserve_window(len(rows), plan.width)
        hidden_TD = self.model(token_RW.flatten(), step)
        read_M = torch.from_numpy(np.flatnonzero(plan.is_read_RW[rows])).to(self.device)
        predicted_T3 = torch.zeros((len(rows) * plan.width, 3), device=self.device)
        predicted_T3[read_M] = self._predict(hidden_TD[read_M], plan, rows, read_M)
        return predicted_T3.view(len(rows), plan.width, 3)

    def _upload(self, plan: StepPlan, rows: Int) -> tuple[DeviceStep, Tensor]:
        """One copy to the device for everything a step needs."""
        width = plan.width
        per_row = (plan.start_R, plan.num_keys_R, plan.cached_R, plan.slot_R)
        packed = np.concatenate(
            [plan.token_RW[rows], plan.position_RW[rows], plan.horizon_RW[rows], np.stack(per_row, axis=1)[rows]],
            axis=1,
        )
        device_RX = torch.from_numpy(packed).to(self.device, non_blocking=True)
        token_RW, position_RW, horizon_RW, per_row_R4 = device_RX.split([width, width, width, len(per_row)], dim=1)
        start_R, num_keys_R, cached_R, slot_R = per_row_R4.unbind(dim=1)
        slots, num_cached = np.unique(plan.slot_R[rows]), int(plan.cached_R[rows].max())
        step = DeviceStep(
            position_RW=position_RW,
            slot_R=slot_R,
            slot=int(slots[0]) if len(slots) == 1 else None,
            num_cached=num_cached,
            is_visible_R1WX=visible_keys(horizon_RW, start_R, num_keys_R, cached_R, num_cached),
        )
        return step, token_RW

    def _predict(self, hidden_MD: Tensor, plan: StepPlan, rows: Int, read_M: Tensor) -> Tensor:
        logits_MV = self.model.ops.linear(hidden_MD, self.model.lm_head)
        sampling, vocab_start = plan.sampling, self.model.vocab_start
        if sampling.temperature == 0:
            statistics_M6 = shard_statistics(logits_MV, vocab_start, sampling)
            return merge_statistics(self._collectives.tp_stack(statistics_M6), sampling.strategy)
        keys = self._noise_keys(plan, rows, read_M)
        return sampled_statistics(
            logits_MV, vocab_start, sampling, keys, self._collectives.tp_sum, self._collectives.tp_stack
        )

    def _noise_keys(self, plan: StepPlan, rows: Int, read_M: Tensor) -> NoiseKeys:
        row_M = torch.div(read_M, plan.width, rounding_mode="floor")
        per_row = (torch.from_numpy(values[rows]).to(self.device)[row_M] for values in (plan.noise_key_R, plan.step_R))
        position_RW = torch.from_numpy(plan.position_RW[rows]).to(self.device)
        return NoiseKeys(*per_row, position_RW.flatten()[read_M] + 1)

    def _commit_own(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """Copy spans from this rank's own rows: the winner's, or under block-causal attention any row of the request."""
        held = self._row_of[self.mesh.bp_rank]
        for span in plan.commits:
            if plan.is_block_causal:
                local = int(np.flatnonzero(plan.request_R[held] == span.request)[0])
            else:
                local = int(np.flatnonzero(held == winner_row_of_request[span.request])[0])
            self.cache.commit(span.slot, span.start, self.cache.window_span(local, span.length))

    def _commit_winner(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        """One broadcast for each rank that owns winners: all layers of all its spans in one buffer."""
        spans_of: dict[int, list[tuple[CommitSpan, int]]] = defaultdict(list)
        for span in plan.commits:
            owner, local = np.argwhere(self._row_of == winner_row_of_request[span.request])[0]
            spans_of[int(owner)].append((span, int(local)))
        for owner, spans in sorted(spans_of.items()):
            windows = [self.cache.window_span(local, span.length) for span, local in spans]
            buffer = torch.cat(windows, dim=2) if owner == self.mesh.bp_rank else self._empty_like(windows)
            self._collectives.bp_broadcast(buffer, owner)
            for (span, _), received in zip(spans, buffer.split([span.length for span, _ in spans], dim=2), strict=True):
                self.cache.commit(span.slot, span.start, received)

    @staticmethod
    def _empty_like(windows: list[Tensor]) -> Tensor:
        layers, two, _, heads, size = windows[0].shape
        return windows[0].new_empty((layers, two, sum(window.shape[2] for window in windows), heads, size))

    def _explain(self, error: RuntimeError) -> str:
        where = f"rank {self.mesh.rank}, step {self.num_steps}"
        if isinstance(error, torch.OutOfMemoryError):
            return f"{where}: out of device memory; lower max_num_requests, num_lookahead or max_model_len"
        return f"{where}: {str(error).splitlines()[0]}"


def _in_plan_order(predicted_PRW3: np.ndarray, row_of: Int, num_rows: int) -> Predictions:
    """Gathered rows back in the plan's order; a row computed on several ranks counts once, from the first."""
    width = predicted_PRW3.shape[2]
    ordered = np.empty((num_rows, width, 3), dtype=np.float32)
    ordered[row_of.flatten()[::-1]] = predicted_PRW3.reshape(-1, width, 3)[::-1]
    return Predictions(ordered[..., 0].astype(np.int64), ordered[..., 1], ordered[..., 2])
