"""Builds a running engine from a profile and a run: device, mesh, cache, weights, operators, buckets, capture."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from common.checkpoint import ModelConfig, load_model_config
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, MissingCapability
from common.platforms import platform_of
from common.processes import Mesh, init_mesh, local_rank, num_started, share_from_first
from common.runtime import (
    Collectives,
    Holdings,
    ModelLoader,
    PagedCapacity,
    allocating_kv,
    longest_request,
    measure_floors,
    pages_within,
)
from graphs.buckets import Buckets
from graphs.runner import Capture
from lopa_cuda.engine import CudaEngine
from lopa_cuda.floors import median_seconds
from lopa_cuda.machine import MACHINE
from lopa_cuda.ops import TorchOps
from lopa_cuda.parallel import build_collectives
from lopa_cuda.steps import PAGE_SIZE, CacheSizes, PagedKVCache
from lopa_cuda.tiles import install_tiles, load_tiles, model_linears, tell, this_device, without_wide
from lopa_cuda.warmup import most_reads, usual_tokens, warm_up
from lopa_cuda.wgmma import why_unavailable

if TYPE_CHECKING:
    from lopa_cuda.ops.fused import FusedOps
    from lopa_cuda.parallel.peer_staging import PeerStaging

logger = logging.getLogger(__name__)

HEAD_SIZES = (16, 32, 64, 128, 256)  # which tensor cores, Triton's blocks and shared memory take
# Tokens of the largest captured step: for one request, and for any number, since its scratch memory is held for good.
LEAST_CAPTURED_TOKENS, MOST_CAPTURED_TOKENS, MOST_CAPTURED_BYTES = 4096, 131072, 9 * 2**29
LEAST_CAPTURED_READS, MOST_LOGITS_BYTES = 512, 2**31


def assemble(
    profile: DeviceProfile, run: RunConfig, capture: Capture | None = None, num_pages: int | None = None
) -> CudaEngine:
    """Load the run's model onto this process's device. Raises ConfigError or MissingCapability before loading.

    capture: instead of the profile's own. num_pages: of the KV cache, instead of what the device has room for.
    """
    config = load_model_config(run.model)
    device = _device(profile)
    profile = with_chosen_mesh(profile, run, config, device)
    mesh = init_mesh(profile, platform_of(profile).group_backends())
    dtype = getattr(torch, profile.dtype)
    capture = capture or _capture(profile, dtype, config)
    max_model_len = longest_request(profile, config)
    sizes = CacheSizes(
        config.num_layers, run.max_num_requests, max_model_len, config.kv_heads_of_rank(mesh.tp_size),
        config.head_size, dtype,
    )  # fmt: skip
    buckets = _buckets(profile, run, config, sizes, mesh)
    sizes = replace(sizes, captured_tokens=buckets.tokens[-1] if capture else 0)
    is_choosing = chooses_tiles(profile, dtype, config)
    tiles = _install_tiles(profile, run, config, mesh.tp_size, mesh.tp_rank) if is_choosing else []
    no_ops_yet: Any = None  # they need the KV cache, which is sized by the memory that the weights leave
    loader = ModelLoader(profile, run, config, config, no_ops_yet, mesh, device)
    model = loader.load()
    collectives = build_collectives(mesh, device)
    num_pages = collectives.least(num_pages or _num_pages(sizes, device, profile.gpu_memory_utilization))
    peers = _peer_staging(sizes, mesh, device) if capture and _wants_kernels(profile, dtype, config) else None
    num_bytes = num_pages * sizes.bytes_per_page + sizes.staging_bytes
    with allocating_kv(sizes.num_slots, sizes.max_model_len, num_bytes):
        cache = PagedKVCache(sizes, num_pages, device, peers)
    capacity = PagedCapacity(
        run.max_num_requests, max_model_len, num_pages, page_size=PAGE_SIZE, vocab_size=config.vocab_size,
        routing_block=config.routing_block, gives_logprobs=True,
    )  # fmt: skip
    model.ops = ops = _ops(profile, config, cache, collectives)
    ops.adopt(model)
    details = {
        "cuda": torch.version.cuda, "kernels": type(ops).__name__, "tiles": tiles,
        "graph": profile.graph.mode if capture else "eager",
    }  # fmt: skip
    # A little before NCCL's own watchdog, which would end the process without a word.
    timeout_s = 0.9 * profile.collective_timeout_s
    engine = CudaEngine(
        model, config, ops, cache, capacity, collectives, device, buckets, capture, timeout_s, details
    )  # fmt: skip
    warm = partial(warm_up, engine, config, run.decode)
    engine.holdings = Holdings(model, loader, cache.tensors, engine.forget_captures, warm)
    warm()
    return engine


def with_chosen_mesh(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, device: torch.device
) -> DeviceProfile:
    """Decide `mesh: auto` for the processes that were started, by the first rank's floors."""
    if profile.mesh != "auto" or num_started() == 1:
        return profile
    from common.bench import fastest_mesh  # it knows more than other starts need

    floors = share_from_first(measure_floors(device, getattr(torch, profile.dtype), median_seconds))
    mesh = fastest_mesh(profile, run, config, num_started(), floors)
    return profile.model_copy(update={"mesh": mesh})


def _device(profile: DeviceProfile) -> torch.device:
    if profile.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MissingCapability(
            f"profile {profile.name} needs a CUDA device and none is visible: name another, such as --profile cpu"
        )
    if local_rank() >= torch.cuda.device_count():
        raise MissingCapability(
            f"profile {profile.name}: process {local_rank()} of this node has no GPU, {torch.cuda.device_count()} are "
            "visible; start fewer processes a node or make more GPUs visible"
        )
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())


def _capture(profile: DeviceProfile, dtype: torch.dtype, config: ModelConfig) -> Capture | None:
    if profile.graph.mode == "eager":
        return None
    if profile.graph.mode != "cuda_graph":
        raise MissingCapability(f"engine lopa_cuda has no graph.mode {profile.graph.mode}: set cuda_graph or eager")
    if not _wants_kernels(profile, dtype, config):
        logger.info("plain operators take rows' lengths from the host: passes are not captured")
        return None
    from graphs.cuda import CudaCapture

    return CudaCapture()


def _buckets(profile: DeviceProfile, run: RunConfig, config: ModelConfig, sizes: CacheSizes, mesh: Mesh) -> Buckets:
    """Sizes of any step up to the largest that is captured, those that steps usually have among them."""
    decode, num_slots = run.decode, run.max_num_requests
    rows = num_slots * -(-(decode.num_lookahead + 1) // mesh.bp_size)
    fixed = tuple(sorted(profile.graph.token_buckets))
    usual = most_reads(decode, num_slots, mesh.bp_size)
    most = most_captured_tokens(config, mesh.tp_size, sizes.bytes_per_position)
    captured = max(LEAST_CAPTURED_TOKENS, min(usual, most))
    max_tokens = fixed[-1] if fixed else min(captured, rows * sizes.max_model_len)
    reads = max(LEAST_CAPTURED_READS, min(usual, MOST_LOGITS_BYTES // (2 * config.vocab_size)))
    buckets = Buckets(knee=MACHINE.knee_tokens, max_tokens=max_tokens, max_reads=min(max_tokens, reads), fixed=fixed)
    return buckets.wanting(usual_tokens(decode, mesh.bp_size))


def most_captured_tokens(config: ModelConfig, tp_size: int, kv_bytes: int) -> int:
    """Tokens of the largest step that a graph may hold. A token takes kv_bytes of staged KV, and gate and up of the
    widest MLP in bf16; in a mixture of experts the input and output of each of its experts, those of other ranks
    too."""
    gate_up = 2 * config.intermediate_size // tp_size
    moe = config.moe
    experts = moe.experts_per_token * (moe.intermediate_size + config.hidden_size) if moe else 0
    return min(MOST_CAPTURED_TOKENS, MOST_CAPTURED_BYTES // (kv_bytes + 2 * max(gate_up, experts)))


def _ops(
    profile: DeviceProfile, config: ModelConfig, cache: PagedKVCache, collectives: Collectives
) -> TorchOps | FusedOps:
    """The operators that the profile asks for. `auto` is Triton where the device and dtype allow it, and says so."""
    dtype = cache.committed.dtype
    if not _wants_kernels(profile, dtype, config):
        return TorchOps(config, cache, collectives)
    if profile.kernels == "npu":
        raise MissingCapability(f"profile {profile.name}: kernels npu are of engine lopa_ascend: set kernels to auto")
    if profile.kernels not in ("triton", "auto") or not _can_fuse(profile, dtype, config):
        raise MissingCapability(
            f"profile {profile.name}: kernels {profile.kernels} of engine lopa_cuda need device cuda, dtype bfloat16 "
            f"and heads of {', '.join(map(str, HEAD_SIZES))} channels (this model's have {config.head_size}): set "
            "kernels to torch or auto"
        )
    if profile.batch_invariant and config.moe is not None:
        raise MissingCapability(
            f"profile {profile.name}: batch_invariant of a mixture of experts is not implemented: remove it"
        )
    if config.moe is not None and profile.quantization is not None:
        _check_8_bit_experts(profile, config.hidden_size, config.moe.intermediate_size)
    try:
        from lopa_cuda.ops.fused import FusedOps, InvariantOps
    except ImportError as error:
        raise MissingCapability(
            f"kernels {profile.kernels} need Triton ({error}): run `pip install -e '.[cuda]'`"
        ) from None
    return (InvariantOps if profile.batch_invariant else FusedOps)(config, cache, collectives)


def _check_8_bit_experts(profile: DeviceProfile, *widths: int) -> None:
    if any(width % 32 for width in widths):  # what the matrix unit takes of 8-bit numbers at a time
        raise MissingCapability(
            f"profile {profile.name}: the model is {widths[0]} wide and its experts {widths[1]}, kernels for experts "
            "in 8 bits take multiples of 32: remove quantization, or set kernels to torch"
        )


def _install_tiles(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, tp_size: int, tp_rank: int
) -> list[str]:
    """The tiles of this device for this process's linears; the files they come from. Raises ConfigError."""
    device = this_device()
    tiles, why = load_tiles(device), why_unavailable()
    install_tiles(without_wide(tiles.table) if why else tiles.table)
    if why:
        logger.info("no wide tiles on this device: %s; linears that have them run on the library", why)
    logger.info("%s", tell(device, tiles, model_linears(profile, run, config, tp_size, tp_rank)))
    return [str(path) for path in tiles.files]


def _can_fuse(profile: DeviceProfile, dtype: torch.dtype, config: ModelConfig) -> bool:
    return profile.device == "cuda" and dtype == torch.bfloat16 and config.head_size in HEAD_SIZES


def _wants_kernels(profile: DeviceProfile, dtype: torch.dtype, config: ModelConfig) -> bool:
    return profile.kernels != "torch" and (profile.kernels != "auto" or _can_fuse(profile, dtype, config))


def chooses_tiles(profile: DeviceProfile, dtype: torch.dtype, config: ModelConfig) -> bool:
    """Whether its linears are looked up by their shapes; those of `batch_invariant` have one tile."""
    return profile.device == "cuda" and _wants_kernels(profile, dtype, config) and not profile.batch_invariant


def _num_pages(sizes: CacheSizes, device: torch.device, utilization: float) -> int:
    """Return the KV pages that all requests need at their longest, on a GPU at most what its free memory holds."""
    if device.type != "cuda":
        return sizes.most_pages
    free = int(torch.cuda.mem_get_info(device)[0] * utilization)
    room = (free - sizes.staging_bytes) // sizes.bytes_per_page
    if room < sizes.pages_of_slot:
        needed = sizes.staging_bytes + sizes.pages_of_slot * sizes.bytes_per_page
        raise ConfigError(
            f"the KV cache of one request of {sizes.max_model_len} positions needs {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free on {device}: lower max_model_len or raise gpu_memory_utilization"
        )
    return pages_within(room, sizes.most_pages)


def _peer_staging(sizes: CacheSizes, mesh: Mesh, device: torch.device) -> PeerStaging | None:
    """Captured staging memory that the branch-parallel ranks write for one another; None without such ranks, or where
    they cannot."""
    if device.type != "cuda":
        return None
    try:
        from lopa_cuda.parallel.peer_staging import build_peer_staging
    except ImportError:
        return None  # no Triton, of which `_ops` tells
    return build_peer_staging(mesh.bp_group, device, sizes.staging_shape, sizes.dtype)
