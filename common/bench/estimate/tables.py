"""What `lopa estimate` prints: the step by part, what changes would buy, other meshes, and what was taken on trust."""

from __future__ import annotations

from collections.abc import Sequence

from common.bench.estimate.cost import StepCost, estimate_step
from common.bench.estimate.hardware import Hardware, hardware_of, load_hardware, others_of
from common.bench.estimate.scenario import Options, changes, meshes, setup_of
from common.bench.estimate.setup import Setup
from common.checkpoint import load_model_config
from common.config import DeviceProfile, RunConfig
from common.runtime import check_strategy
from common.tables import counted, markdown
from graphs.hccl import DETERMINISTIC, sums_in_one_order

_GOES_TO = {
    "memory": "memory: reading and writing it",
    "matrix": "matrix: arithmetic of products and attention",
    "launch": "launch: starting and ending kernels",
    "latency": "latency: starting and ending collectives",
    "link": "link: bytes between devices",
    "host": "host: its work while devices wait",
}


def estimate_tables(profile: DeviceProfile, run: RunConfig, options: Options, hardware_name: str | None) -> str:
    """Return the tables of the run's model, of which only config.json is read. Raises ConfigError with the fix."""
    hardware = hardware_of(profile) if hardware_name is None else load_hardware(hardware_name)
    model = load_model_config(run.model)
    check_strategy(run.decode, model)
    setup = setup_of(profile, run, model, options)
    assert profile.mesh != "auto", "setup_of refuses it"
    return report(setup, hardware, profile.mesh.data_parallel_size)


def report(setup: Setup, hardware: Hardware, num_replicas: int = 1) -> str:
    """Return the tables of one step. Raises ConfigError where the hardware's file lacks what it needs."""
    step = estimate_step(setup, hardware)
    sections = [
        _total(step, hardware, num_replicas),
        hardware.remark,
        _conditions(setup, hardware),
        "What the time goes to:\n\n" + _bounds(step),
        "Where it goes, by part; limit: what takes most of it:\n\n" + _parts(step),
        "What one change would do, each alone:\n\n" + _changes(step, hardware),
        _meshes(step, hardware, num_replicas),
        _trust(setup, hardware),
    ]
    return "\n\n".join(section for section in sections if section)


def _total(step: StepCost, hardware: Hardware, num_replicas: int) -> str:
    total, each = step.tokens_per_s * num_replicas, step.tokens_per_s / step.setup.num_requests
    by_others = {name: estimate_step(step.setup, other).ms for name, other in others_of(hardware).items()}
    others = "".join(f" ({ms:.2f} by {name})" for name, ms in by_others.items())
    return (
        f"{step.ms:.2f} ms a step{others}; at {step.setup.tokens_per_step:g} tokens a step and request (an assumption: "
        f"--tpf) {total:.0f} tokens/s in all, {each:.0f} a request."
    )


def _conditions(setup: Setup, hardware: Hardware) -> str:
    attention = "block-causal" if setup.is_block_causal else "full"
    chosen = ", fused ones if the start finds them faster" if setup.launches.chooses_fusions else ""
    launched = "captured" if setup.is_captured else "launched one by one"
    groups, devices = counted(setup.bp, "group"), counted(setup.tp, "device")
    return (
        f"One step on {setup.bp * setup.tp} x {hardware.name}: rows are shared by {groups} (bp), each layer by "
        f"{devices} (tp). {counted(setup.num_rows, 'row')} of {counted(setup.num_requests, 'request')}, {setup.rows} "
        f"on each device, window {setup.window} after {setup.prefix} cached positions, {attention} attention, "
        f"{setup.num_reads} positions through the head; linears in {setup.linear_dtype}, "
        f"{setup.launches.name}{chosen}, {launched}."
        f"{_told_all_reduces(setup)}"
    )


def _told_all_reduces(setup: Setup) -> str:
    """Say on what HCCL runs the step's all-reduces, and up to which size it would take the faster of two ways."""
    size, most = setup.all_reduce_bytes, setup.most_aiv_bytes
    if setup.hccl is None or most is None or setup.tp == 1:
        return ""
    runs_on = "on vector cores (AIV)" if size <= most else "by AI_CPU, the slow way"
    order = "true" if sums_in_one_order(setup.hccl) else "false"
    return (
        f" HCCL runs all-reduces of {size / 2**10:.0f} KiB over {setup.tp} devices {runs_on}: vector cores take up to "
        f"{most / 2**10:.0f} KiB, {most * setup.num_tokens // size} tokens, with {DETERMINISTIC}: {order}."
    )


def _bounds(step: StepCost) -> str:
    rows = [
        [_GOES_TO[name], f"{seconds * 1e3:.2f}", f"{seconds * 1e5 / step.ms:.0f}"]
        for name, seconds in step.seconds_of.items()
    ]
    return markdown(["goes to", "ms", "%"], rows)


def _parts(step: StepCost) -> str:
    rows = [
        [part.part, f"{part.num_kernels:.0f}", f"{part.num_bytes / 1e6:.1f}", f"{part.seconds * 1e3:.3f}",
         f"{part.seconds * 1e5 / step.ms:.1f}", part.limit]
        for part in step.parts
    ]  # fmt: skip
    total = sum(part.num_bytes for part in step.parts) / 1e6
    count = sum(part.num_kernels for part in step.parts)
    rows.append(["step", f"{count:.0f}", f"{total:.1f}", f"{step.ms:.3f}", "100.0", ""])
    return markdown(["part", "kernels", "MB", "ms", "%", "limit"], rows)


def _changes(step: StepCost, hardware: Hardware) -> str:
    others = [(estimate_step(changed, faster).ms, name) for name, changed, faster in changes(step.setup, hardware)]
    rows = [
        [name, f"{ms:.3f}", f"{ms - step.ms:+.3f}", f"{(ms / step.ms - 1) * 100:+.1f}"] for ms, name in sorted(others)
    ]
    return markdown(["instead", "step ms", "difference", "%"], rows)


def _meshes(step: StepCost, hardware: Hardware, num_replicas: int) -> str:
    candidates = [estimate_step(setup, hardware) for setup in meshes(step.setup)]
    if len(candidates) < 2:
        return ""
    best = min(candidates, key=lambda candidate: candidate.ms)
    rows = [_mesh_row(candidate, num_replicas, is_best=candidate is best) for candidate in candidates]
    headings = ["mesh", "rows/device", "weights GB/device", "step ms", "tokens/s", ""]
    return "The same devices arranged otherwise:\n\n" + markdown(headings, rows)


def _mesh_row(step: StepCost, num_replicas: int, *, is_best: bool) -> Sequence[str]:
    setup = step.setup
    return [
        f"bp {setup.bp} x tp {setup.tp}", str(setup.rows), f"{step.weight_bytes / 1e9:.2f}", f"{step.ms:.2f}",
        f"{step.tokens_per_s * num_replicas:.0f}", "shortest" if is_best else "",
    ]  # fmt: skip


def _trust(setup: Setup, hardware: Hardware) -> str:
    lines = [
        f"assumed: {setup.read_share:.0%} of the window goes through the head; "
        f"{setup.tokens_per_step:g} tokens a step; no padding; every row as wide as the window"
    ]
    for name, figure in hardware.figures():
        if figure.quality != "measured":
            lines.append(f"{figure.quality}: {name} {figure.value:g} ({figure.source})")
    return "Not measured:\n\n" + "\n".join(f"- {line}" for line in lines)
