"""Make the step that is estimated, and those that it is compared with, of a profile and a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.bench.estimate.hardware import Hardware
from common.bench.estimate.setup import GROUPED_SWIGLU_COLUMNS, LAUNCHES, Launches, Setup
from common.checkpoint import ModelConfig, check_tensor_parallel, fits_tensor_parallel
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.errors import ConfigError
from graphs.hccl import DETERMINISTIC, sums_in_one_order

_LINEAR_DTYPE = {"w8a8": "int8", "fp8": "float8"}
_UPDATES_LENGTHS = ("npugraph", "npugraph_ex")
_COMPILED = ("npugraph_ex", "torchair")
_MOST_POSITIONS = 10**13  # of a step; operators of more cannot even be written down
_BLOCKS_OPEN = 3  # of a d2f window; more where lookahead fills well, fewer at the end


@dataclass(frozen=True, slots=True)
class Options:
    """rows: of a replica, all requests together. window: positions a row. None: what the run says or usually gives."""

    rows: int | None = None
    window: int | None = None
    prefix: int = 1024
    read_share: float = 0.6
    tokens_per_step: float = 10.0


def setup_of(profile: DeviceProfile, run: RunConfig, model: ModelConfig, options: Options) -> Setup:
    """Return the step of profile and run. Raises ConfigError where only a start on the hardware decides what it is."""
    mesh, decode, launches = _mesh(profile), run.decode, _launches(profile, model)
    check_tensor_parallel(model, mesh.tensor_parallel_size)
    window, prefix = _window_and_prefix(decode, options)
    order = profile.npu.length_updates if profile.graph.mode in _UPDATES_LENGTHS else None
    num_rows = options.rows or run.max_num_requests * (decode.num_lookahead + 1)
    if num_rows * window > _MOST_POSITIONS:
        raise ConfigError(
            f"{num_rows} rows of {window} positions are more than any device computes in a step: lower "
            "decode.num_lookahead, max_num_requests or decode.block_size, or give --rows and --window"
        )
    return Setup(
        model=model,
        launches=launches,
        dtype=profile.dtype,
        linear_dtype=_LINEAR_DTYPE.get(profile.quantization or "", profile.dtype),
        tp=mesh.tensor_parallel_size,
        bp=mesh.branch_parallel_size,
        num_rows=num_rows,
        num_requests=run.max_num_requests,
        window=window,
        prefix=prefix,
        block_size=min(decode.block_size, window),
        read_share=options.read_share,
        tokens_per_step=options.tokens_per_step,
        is_block_causal=decode.window_attention == "block_causal" or launches.is_block_causal_only,
        quantizes_head=profile.quantize_lm_head,
        is_captured=profile.graph.mode != "eager",
        hides_all_reduce=profile.npu.weight_prefetch_mb > 0 and mesh.tensor_parallel_size > 1,
        prefetch_bytes=profile.npu.weight_prefetch_mb * 2.0**20 or float("inf"),
        length_updates=order,
        length_events=order,
        hccl=profile.environment if profile.device == "npu" else None,
    )


def changes(setup: Setup, hardware: Hardware) -> Iterator[tuple[str, Setup, Hardware]]:
    """The same step with one thing done otherwise, or faster than anything can do it."""
    for name, changed in _changed_setups(setup):
        yield name, changed, hardware
    full = hardware.attention_matrix_share.model_copy(update={"value": 1.0})
    faster = hardware.model_copy(update={"attention_matrix_share": full})
    yield "attention at the matrix units' full rate", setup, faster


def _changed_setups(setup: Setup) -> Iterator[tuple[str, Setup]]:
    if setup.is_quantized:
        yield f"linears in {setup.dtype}", replace(setup, linear_dtype=setup.dtype)
        if not setup.quantizes_head:
            yield "the head in 8 bits", replace(setup, quantizes_head=True)
    elif setup.model.moe is None:
        yield "linears in W8A8", replace(setup, linear_dtype="int8")
    yield from ((name, replace(setup, launches=launches)) for name, launches in _changed_launches(setup))
    if setup.tp > 1:
        yield "all-reduces overlapped (weights prefetched)", replace(setup, hides_all_reduce=not setup.hides_all_reduce)
    if setup.tp > 1 and setup.hccl is not None:
        value = str(not sums_in_one_order(setup.hccl)).lower()
        yield f"{DETERMINISTIC}: {value}", replace(setup, hccl={**setup.hccl, DETERMINISTIC: value})
    if setup.length_updates == "after":
        yield "attention lengths written before the replay", replace(setup, length_updates="before")
    if setup.length_events == "after":
        yield "events of kept lengths recorded before the replay", replace(setup, length_events="before")
    if replace(setup, cuts_all_reduces=True).all_reduce_pieces > setup.all_reduce_pieces:
        yield "all-reduces in pieces that vector cores take", replace(setup, cuts_all_reduces=True)
    yield "the host a step ahead (asynchronous scheduling)", replace(setup, hides_host=True)
    name = "launched one by one" if setup.is_captured else "captured in a graph"
    yield name, replace(setup, is_captured=not setup.is_captured)


def _changed_launches(setup: Setup) -> Iterator[tuple[str, Launches]]:
    launches = setup.launches
    yield "q, k, v not merged", replace(launches, merges_qkv=not launches.merges_qkv)
    if setup.is_quantized:
        yield "norm and quantization not fused", replace(launches, fuses_norm_quant=not launches.fuses_norm_quant)
    if launches.chooses_fusions:
        is_one = launches.kv_write_kernels == 0
        name = f"split, rotation and KV write in {'five kernels' if is_one else 'one kernel'}"
        yield name, launches.rotating(in_one_kernel=not is_one)
    columns = 2 * setup.model.intermediate_size // setup.tp
    if launches.chooses_fusions and setup.linear_dtype == "int8" and columns <= GROUPED_SWIGLU_COLUMNS:
        is_one = setup.fuses_swiglu(columns)
        name = f"gate and up, SwiGLU and quantization in {'two kernels' if is_one else 'one kernel'}"
        yield name, launches.activating(in_one_kernel=not is_one)
    if launches.statistics_bytes > 2:
        yield "head statistics in one pass", replace(launches, statistics_kernels=3, statistics_bytes=2)


def meshes(setup: Setup) -> Iterator[Setup]:
    """All ways to arrange the same devices that the model can be cut for."""
    num_devices, model = setup.tp * setup.bp, setup.model
    for tp in range(1, num_devices + 1):
        if num_devices % tp == 0 and fits_tensor_parallel(model, tp):
            yield replace(setup, tp=tp, bp=num_devices // tp)


def _mesh(profile: DeviceProfile) -> MeshConfig:
    if profile.mesh == "auto":
        raise ConfigError(
            f"profile {profile.name}: mesh auto is decided on the machine: give a mesh to estimate, for example "
            "--set 'mesh={branch_parallel_size: 4, tensor_parallel_size: 1}'"
        )
    return profile.mesh


def _launches(profile: DeviceProfile, model: ModelConfig) -> Launches:
    """What the engine takes if a start finds it faster. It gives a graph compiler no fused operators, and rotates heads
    that are normed in kernels of their own."""
    launches, is_compiled = LAUNCHES[_engine(profile)], profile.graph.mode in _COMPILED
    if not launches.chooses_fusions:
        return launches
    rotates_apart = is_compiled or profile.kernels == "npu" or model.qk_norm
    return launches.activating(in_one_kernel=not is_compiled).rotating(in_one_kernel=not rotates_apart)


def _engine(profile: DeviceProfile) -> str:
    if profile.engine == "auto":
        return "lopa_ascend" if profile.device == "npu" else "lopa_cuda"
    return profile.engine


def _window_and_prefix(decode: DecodeConfig, options: Options) -> tuple[int, int]:
    """vanilla forwards prompt and canvas in every step and caches nothing; fast_dllm and multi_block forward from the
    current block to the canvas's end, on average half of it, or the block alone where what follows it is cached too;
    where blocks are counted from position 0, a step is of one block."""
    canvas = decode.max_new_tokens
    if decode.strategy.name == "vanilla":
        return options.window or options.prefix + canvas, 0
    if decode.strategy.name == "d2f":
        usual = _BLOCKS_OPEN * decode.block_size
    elif decode.strategy.name in ("fast_dllm", "multi_block") and decode.strategy.cached == "prefix":
        usual = (canvas + decode.block_size) // 2
    else:
        usual = decode.block_size
    return options.window or min(usual, canvas), options.prefix
