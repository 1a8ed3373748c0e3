"""What `lopa estimate` prints: the step by part, what changes would buy, other meshes, and what was taken on trust."""

from __future__ import annotations

from collections.abc import Sequence

from common.bench.estimate.cost import StepCost, estimate_step
from common.bench.estimate.hardware import Hardware, hardware_of, load_hardware
from common.bench.estimate.scenario import Options, changes, meshes, setup_of
from common.bench.estimate.setup import Setup
from common.checkpoint import load_model_config
from common.config import DeviceProfile, RunConfig
from common.runtime import check_strategy
from common.tables import markdown


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
        _conditions(setup, hardware),
        hardware.remark,
        _parts(step),
        _total(step, num_replicas),
        "What one change would do:\n\n" + _changes(step, hardware),
        _meshes(step, hardware, num_replicas),
        _trust(setup, hardware),
    ]
    return "\n\n".join(section for section in sections if section)


def _conditions(setup: Setup, hardware: Hardware) -> str:
    attention = "block-causal" if setup.is_block_causal else "full"
    launched = "captured" if setup.is_captured else "launched one by one"
    return (
        f"One step on {hardware.name}: bp {setup.bp} x tp {setup.tp}, {setup.num_rows} rows of {setup.num_requests} "
        f"request(s), {setup.rows} on each device, window {setup.window} after {setup.prefix} cached positions, "
        f"{attention} attention, {setup.num_reads} positions through the head; linears in {setup.linear_dtype}, "
        f"{setup.launches.name}, {launched}."
    )


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


def _total(step: StepCost, num_replicas: int) -> str:
    total, each = step.tokens_per_s * num_replicas, step.tokens_per_s / step.setup.num_requests
    return (
        f"{step.ms:.2f} ms a step; at {step.setup.tokens_per_step:g} tokens a step and request (an assumption: --tpf) "
        f"{total:.0f} tokens/s in all, {each:.0f} a request."
    )


def _changes(step: StepCost, hardware: Hardware) -> str:
    rows = []
    for name, changed in changes(step.setup):
        other = estimate_step(changed, hardware)
        rows.append([name, f"{other.ms:.3f}", f"{other.ms - step.ms:+.3f}", f"{(other.ms / step.ms - 1) * 100:+.1f}"])
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
