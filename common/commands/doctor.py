"""`lopa doctor`: what this machine has, and whether a profile can run on it, before anyone waits for a model."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.commands.arguments.found import memory_bytes, profile_here
from common.config import DeviceProfile, RunConfig, load_profile, load_run
from common.errors import ConfigError, harmless
from common.platforms import Finding, Platform, all_platforms, platform_of
from common.processes import Nodes, inform, processes_here, resolve_mesh
from common.scoring import fingerprint
from common.version import version_of


def doctor(
    profile: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--profile", "-p", help="Also say whether this profile can run here; exit 2 if not."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="MODEL",
            help="Also say how this model's linears would be computed with the profile, and what that costs.",
        ),
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Also run each operation of an Ascend profile; exit 2 if one is wrong.")
    ] = False,
) -> None:
    """Show what this machine has: devices, driver or CANN, torch, collectives, Triton."""
    device_profile = None if profile is None else load_profile(profile)
    if selftest and device_profile is None:  # before a report that does not answer the question
        raise ConfigError("--selftest is for profiles of device npu: add --profile ascend_910c_tp4_bp4")
    if model is not None and device_profile is None:
        raise ConfigError("--model is looked at with a profile: add --profile ascend_910c_tp4_bp4")
    model = model and load_run(model).model
    exit_code = examine(device_profile)
    if model is not None and device_profile is not None:
        inform(linears_of(device_profile, model))
    if selftest and device_profile is not None:
        exit_code = exit_code or run_selftest(device_profile, model)
    raise typer.Exit(exit_code)


def examine(profile: DeviceProfile | None) -> int:
    """Print the report; 0 if the profile (if there is one) can run here, else 2."""
    _print("this machine", list(machine()))
    if profile is None:
        return 0
    needs = list(requirements(profile))
    can_run = all(need.is_ok is not False for need in needs)
    _print(f"profile {profile.name}: {'can run here' if can_run else 'cannot run here'}", needs)
    return 0 if can_run else 2


def linears_of(profile: DeviceProfile, model: str) -> str:
    """A sentence. Raises ConfigError, or QuantizationError where the folder is damaged."""
    # Here: they load torch, which the commands that only start others do without.
    from common.bench import tell_schemes
    from common.checkpoint import load_model_config
    from common.runtime import linear_schemes

    config = load_model_config(model)
    return tell_schemes(profile, RunConfig(model=model), config, linear_schemes(profile, model, config))


def run_selftest(profile: DeviceProfile, model: str | None = None) -> int:
    """Compute every operation on the device beside its CPU twin; 0 unless one that is called is wrong, then 2.

    model: whose linears decide what is called. Raises ConfigError.
    """
    findings = platform_of(profile).selftest(profile, model)
    is_right = all(finding.is_ok is not False for finding in findings)
    title = "no operation that is called is wrong" if is_right else "do not serve with this CANN"
    _print(f"self-test: {title}", findings, bad="wrong")
    return 0 if is_right else 2


def machine() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    about = fingerprint()
    yield Finding("python", f"{about['python']} ({sys.executable})")
    yield Finding("lopa", f"{about['lopa']}, commit {about['commit'] or 'unknown (not a git checkout)'}")
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}")
    yield Finding("cpu", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    yield Finding("memory", f"{memory_bytes() / 2**30:.1f} GiB")
    yield Finding("profile", f"{profile_here()}, unless --profile names another")
    for own in all_platforms():
        if own.visible_devices_variable is not None:
            yield Finding(f"{own.device} devices", f"{own.num_visible_devices()} visible{_visibility(own)}")
        yield from (Finding(name, version or "not found") for name, version in own.versions().items())
    for package in ("triton", "transformers", "tokenizers", "safetensors", "numpy"):
        yield Finding(package, version_of(package) or "not installed")
    here = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "hccl": version_of("torch-npu")}
    yield Finding("collectives", ", ".join(name for name, is_here in here.items() if is_here) or "none")


def requirements(profile: DeviceProfile) -> Iterator[Finding]:
    """Judge each thing that the profile needs."""
    mesh, here = resolve_mesh(profile), processes_here(profile, Nodes.from_environment(os.environ))
    sizes = f"dp {mesh.data_parallel_size} x bp {mesh.branch_parallel_size} x tp {mesh.tensor_parallel_size}"
    yield Finding("processes", f"{mesh.num_processes} ({sizes}), {here} on each node")
    own = platform_of(profile)
    if own.visible_devices_variable is None:
        yield Finding("device", profile.device, True)
    else:
        visible = own.num_visible_devices()
        yield Finding("devices", f"{here} {profile.device} wanted on each node, {visible} visible", visible >= here)
    yield from own.requirements(profile, mesh.num_processes, here)
    for name, value in profile.environment.items():
        if os.environ.get(name, value) != value:
            yield Finding(
                "environment", f"{name} is {os.environ[name]!r} here, the profile has {value!r}: yours is kept"
            )


def _visibility(own: Platform) -> str:
    name = own.visible_devices_variable or ""
    return f" ({name}={os.environ[name]})" if name in os.environ else ""


def _print(title: str, findings: Sequence[Finding], bad: str = "missing") -> None:
    table = Table(title=harmless(title), title_justify="left", show_header=False)
    signs = {True: Text("ok", "green"), False: Text(bad, "red"), None: Text()}
    is_judged = any(finding.is_ok is not None for finding in findings)
    for finding in findings:
        sign = [signs[finding.is_ok]] if is_judged else []
        table.add_row(*sign, harmless(finding.subject), harmless(finding.detail))
    console = Console(markup=False, emoji=False)  # .[ascend] is no markup
    (console if console.is_terminal else Console(markup=False, emoji=False, width=140)).print(table)
