"""Builds a running engine from a profile and a run: checks, device, mesh, weights, KV pages."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

import torch

from common.bench import tell_schemes
from common.checkpoint import ModelConfig, check_tensor_parallel, load_model_config
from common.config import DeviceProfile, RunConfig
from common.decoding import Room
from common.errors import ConfigError, EngineError, is_out_of_memory
from common.platforms import platform_of
from common.processes import (
    Mesh,
    init_mesh,
    leave_first_core,
    local_rank,
    meet,
    num_started_here,
    poll_on,
    resolve_mesh,
)
from common.runtime import Collectives, Holdings, PagePool, allocating_kv, linear_schemes, longest_request, pages_within
from graphs.cann import told
from graphs.hccl import most_aiv_tokens
from lopa_ascend.engine import AscendEngine, Graphs
from lopa_ascend.kv import (
    PAGE_SIZE,
    BranchCapacity,
    PageBook,
    PagedKVCache,
    bytes_per_page,
    most_pages,
    most_shift_entries,
    pages_for,
)
from lopa_ascend.limits import check, check_model
from lopa_ascend.load import HEAD_SIZE, attention_scale, load_model, loader_of
from lopa_ascend.ops import (
    Ops,
    VirtualRows,
    keep_kv_writes_in_place,
    lower_attention,
    lower_prefetch,
    npu_ops,
    open_device,
    reference_ops,
)
from lopa_ascend.selftest import Sizes, attention_form, require_correct, settle
from lopa_ascend.shapes import Shapes
from lopa_ascend.stages import AscendStages, RotaryTable
from lopa_ascend.steps import Patience, agreements, folder_of
from lopa_ascend.variables import told_sums
from lopa_ascend.warmup import usual_shapes, warm_up

logger = logging.getLogger(__name__)


def assemble(
    profile: DeviceProfile, run: RunConfig, num_pages: int | None = None, graphs: Graphs | None = None
) -> AscendEngine:
    """Load the run's model onto this process's device. Raises ConfigError or MissingCapability before loading.

    num_pages: pages of KV memory, instead of what the device has room for. graphs: instead of the profile's own.
    """
    check(profile, run)
    config = load_model_config(run.model)
    check_model(profile, config)
    core = leave_first_core() if profile.device == "npu" and profile.npu.cores == "slice" else None
    device, ops = _device_and_ops(profile, config)
    start_s = profile.npu.start_timeout_s if device.type == "npu" else None
    mesh = init_mesh(profile, platform_of(profile).group_backends(), start_s)
    dtype, collectives = getattr(torch, profile.dtype), Collectives(mesh)
    shapes = _shapes(profile, config, mesh)
    if device.type == "npu":
        ops = _proven(ops, profile, run, config, device, mesh, shapes)
        if mesh.is_leader and mesh.tp_size > 1:
            logger.info("%s", told_sums(mesh.tp_size, config.hidden_size, dtype.itemsize, os.environ))
    graphs = graphs or _graphs(profile, config, ops, shapes)
    num_heads = config.num_heads // mesh.tp_size
    max_model_len = longest_request(profile, config)
    stages = AscendStages(ops, collectives, num_heads, attention_scale(config), profile.npu.weight_prefetch_mb * 2**20)
    loader = loader_of(profile, run, config, stages, ops, mesh, device)
    model = load_model(loader)
    page_bytes = bytes_per_page(config.num_layers, config.kv_heads_of_rank(mesh.tp_size), HEAD_SIZE, dtype)
    num_pages = num_pages or _num_pages(profile, run, mesh, max_model_len, page_bytes, device)
    meet(profile.npu.start_timeout_s)  # what follows has a collective's deadline, and some may still read weights
    num_pages = collectives.least(num_pages)
    # A captured step is padded, and captured, on dummy pages: they are no request's.
    reserved = pages_for(max(graphs.shapes.most_tokens, graphs.shapes.most_padding)) if graphs else 0
    with allocating_kv(run.max_num_requests, max_model_len, (num_pages + reserved) * page_bytes):
        cache = PagedKVCache(
            num_layers=config.num_layers, num_pages=num_pages + reserved,
            num_kv_heads=config.kv_heads_of_rank(mesh.tp_size), head_size=HEAD_SIZE, dtype=dtype, device=device,
        )  # fmt: skip
    book = PageBook(PagePool(cache.num_pages))
    rotary = RotaryTable(max_model_len, config.rotary_size, HEAD_SIZE, config.rope_theta, dtype, device)
    capacity = BranchCapacity(
        run.max_num_requests, max_model_len, num_pages, mesh.bp_size, vocab_size=config.vocab_size, page_size=PAGE_SIZE,
        routing_block=config.routing_block, gives_logprobs=True,
    )  # fmt: skip
    details = {"quantization": profile.quantization, "graph": profile.graph.mode if graphs else "eager"}
    patience = Patience(profile.collective_timeout_s, profile.npu.start_timeout_s)
    agree = agreements(mesh, profile.npu.start_timeout_s) if graphs else (bool, bool)
    engine = AscendEngine(
        model, rotary, cache, book, capacity, collectives, device, patience, ops, details, graphs, agree
    )  # fmt: skip
    warm = partial(_warm, engine, graphs, config, run, profile)
    engine.holdings = Holdings(model, loader, cache.tensors, engine.forget_captures, warm)
    warm()
    poll_on(core)
    return engine


def _warm(
    engine: AscendEngine, graphs: Graphs | None, config: ModelConfig, run: RunConfig, profile: DeviceProfile
) -> None:
    if graphs is None:
        return
    try:
        warm_up(engine, graphs.shapes, config, run.decode)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"rank {engine.mesh.rank}: the KV cache has left too little memory to capture steps in ({told(error)}): "
            f"lower gpu_memory_utilization, which is {profile.gpu_memory_utilization:g}, or npu.max_graphs, or end "
            "what else uses the device (`npu-smi info`)"
        ) from error
    meet(profile.npu.start_timeout_s)


def _proven(
    ops: Ops, profile: DeviceProfile, run: RunConfig, config: ModelConfig, device: torch.device, mesh: Mesh,
    shapes: Shapes,
) -> Ops:  # fmt: skip
    """The operations in the forms that are right on this device. Raises MissingCapability where one that is called is
    wrong."""
    check_tensor_parallel(config, mesh.tp_size)
    schemes = linear_schemes(profile, run.model, config, run.load_format)
    if mesh.is_leader:
        logger.info("%s", tell_schemes(profile, run, config, schemes))
    sizes = Sizes.of(config, mesh.tp_size)
    warm = [num_tokens for num_tokens, _ in usual_shapes(shapes, run.decode, mesh.bp_size)]
    sizes = replace(sizes, step_tokens=max(warm, default=sizes.step_tokens))
    ops = settle(ops, sizes, device, mesh, profile)
    require_correct(ops, sizes, device, mesh, profile, set(schemes.values()))
    return ops


def _shapes(profile: DeviceProfile, config: ModelConfig, mesh: Mesh) -> Shapes:
    itemsize = getattr(torch, profile.dtype).itemsize
    most = most_aiv_tokens(mesh.tp_size, config.hidden_size, itemsize, os.environ) if mesh.tp_size > 1 else 0
    return Shapes.of(profile.graph.token_buckets, profile.npu.row_buckets, profile.npu.max_graphs, most)


def _graphs(profile: DeviceProfile, config: ModelConfig, ops: Ops, shapes: Shapes) -> Graphs | None:
    mode = profile.graph.mode
    if mode == "eager":
        return None
    from graphs.npu import AsItIs, NpuCapture, NpugraphEx, Torchair

    if mode == "npugraph":
        return Graphs(shapes, NpuCapture(profile.npu.length_updates))
    folder = folder_of(profile, config, ops)
    if mode == "npugraph_ex":
        keep_kv_writes_in_place()
        return Graphs(shapes, NpuCapture(profile.npu.length_updates), NpugraphEx(folder))
    lower_attention()
    lower_prefetch()
    compiler = Torchair(folder)
    return Graphs(shapes, AsItIs(), compiler, compiler, rows=VirtualRows.as_inputs)


def _device_and_ops(profile: DeviceProfile, config: ModelConfig) -> tuple[torch.device, Ops]:
    """The device of this process, and the operations of its lane."""
    form = attention_form(profile, config.kv_heads_of_rank(resolve_mesh(profile).tensor_parallel_size))
    if profile.device == "cpu":
        return torch.device("cpu"), reference_ops(hardware_types=profile.dtype != "float32", attention=form)
    open_device(num_started_here() or 1, local_rank())
    ops = npu_ops(form)
    return torch.device("npu", local_rank()), ops.with_fused_kv_write() if profile.kernels == "triton" else ops


def _num_pages(
    profile: DeviceProfile, run: RunConfig, mesh: Mesh, max_model_len: int, page_bytes: int, device: torch.device
) -> int:
    """Return the pages that max_num_requests of the longest kind need, on a device at most what its free memory
    holds."""
    prompt_lengths = range(max(1, max_model_len - run.decode.max_new_tokens - PAGE_SIZE), max_model_len)
    most = max(most_pages(Room(length, run.decode), mesh.bp_size) for length in prompt_lengths)
    num_dummies = run.max_num_requests * most_shift_entries(run.decode, mesh.bp_size)
    wanted = run.max_num_requests * most + max(1, pages_for(num_dummies))
    if device.type == "cpu":
        return wanted
    free, total = torch.npu.mem_get_info(device)
    room = int(free - total * (1 - profile.gpu_memory_utilization)) // page_bytes
    if room < 2:
        raise ConfigError(
            f"{free / 2**30:.1f} GiB of {device} are free beside the weights, which leaves no room for KV: end what "
            "else uses the device (`npu-smi info`), raise gpu_memory_utilization or tensor_parallel_size, or set "
            "quantization to w8a8"
        )
    return pages_within(room, wanted)
