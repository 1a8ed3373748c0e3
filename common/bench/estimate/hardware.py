"""What a device can do, as a checked file: configs/hardware/*.yaml. Every figure carries its source and its quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from common.config import DeviceProfile, Settings, load_yaml
from common.errors import ConfigError, did_you_mean, why_no_file

Quality = Literal["measured", "derived", "secondary", "unverified", "assumed"]
Dtype = Literal["bfloat16", "int8", "float8"]

_FOLDER = Path(__file__).resolve().parents[3] / "configs" / "hardware"
_USUAL = {"cuda": "h200", "npu": "ascend_910c"}


class Figure(Settings):
    """A number, and why one should believe it. derived: follows from measured ones. secondary: others' reports that
    agree. unverified: one report, or none that could be checked. assumed: a guess that the estimate needs."""

    value: float = Field(gt=0)
    quality: Quality
    source: str


class Link(Settings):
    """What connects up to num_devices adjacent devices, in each direction. hop_us: beside a collective's own latency,
    for each time that it hands data on from device to device."""

    num_devices: int = Field(ge=2)
    gb_s: Figure
    hop_us: Figure | None = None


class Hardware(Settings):
    """One device and its links; units are in the names. A `share` is what kernels reach of the figure before it."""

    name: str
    device: Literal["cuda", "npu"]
    remark: str
    memory_tb_s: Figure
    linear_memory_share: dict[Dtype, Figure]
    other_memory_share: Figure
    matrix_tflops: dict[Dtype, Figure]
    linear_matrix_share: Figure
    attention_matrix_share: Figure
    num_units: Figure  # multiprocessors or cube cores: work in fewer pieces leaves some idle
    l2_mb: Figure
    # A kernel's fixed cost in a captured graph, beside its roofline: gap, start and end. Products and attention; all
    # others.
    matrix_kernel_us: Figure
    vector_kernel_us: Figure
    eager_kernel_us: Figure
    all_reduce_us: Figure  # latency of a small one
    all_reduce_of_two_us: Figure | None = None  # latency of one inside a norm, as two ranks have it
    ai_cpu_all_reduce_us: Figure | None = None  # latency of one that HCCL keeps from the vector cores
    all_gather_us: Figure
    broadcast_us: Figure
    links: tuple[Link, ...] = Field(min_length=1)
    host_us: Figure  # a step's time outside the device that nothing hides
    # The host's time for the attention of one layer of a replay: to write its lengths; to say that they are as they
    # were.
    length_update_us: Figure | None = None
    length_event_us: Figure | None = None

    def link(self, num_devices: int) -> Link:
        """The slowest link inside a group that spans this many adjacent devices. Raises ConfigError."""
        for link in sorted(self.links, key=lambda link: link.num_devices):
            if num_devices <= link.num_devices:
                return link
        most = max(link.num_devices for link in self.links)
        raise ConfigError(
            f"{self.name}: links of up to {most} devices are described, the mesh spans {num_devices}: "
            "use a smaller mesh, or add the link to the file in configs/hardware"
        )

    def of_dtype(self, figures: Mapping[Dtype, Figure], dtype: str) -> float:
        """Raises ConfigError for a dtype that the file does not describe; float16 is as fast as bfloat16."""
        wanted = "bfloat16" if dtype == "float16" else dtype
        for known, figure in figures.items():
            if known == wanted:
                return figure.value
        raise ConfigError(
            f"{self.name}: {dtype} is not described, only {', '.join(figures)}: "
            "change dtype or quantization in the profile"
        )

    def figures(self) -> Iterator[tuple[str, Figure]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Figure):
                yield name, value
            elif isinstance(value, dict):
                yield from ((f"{name}.{key}", figure) for key, figure in value.items())
        for link in self.links:
            yield f"links.{link.num_devices}.gb_s", link.gb_s
            if link.hop_us is not None:
                yield f"links.{link.num_devices}.hop_us", link.hop_us


def load_hardware(name: str) -> Hardware:
    """A file, or the name of one in configs/hardware. Raises ConfigError."""
    path = next((path for path in (Path(name), _FOLDER / f"{name}.yaml") if path.is_file()), None)
    if path is None:
        hint = did_you_mean(name, _known())
        raise ConfigError(
            f"{name}: {why_no_file(Path(name))}, and not one of configs/hardware ({hint}{', '.join(_known())})"
        )
    return load_yaml(path, Hardware)


def hardware_of(profile: DeviceProfile) -> Hardware:
    """The file that profiles of this device are estimated with unless another is named. Raises ConfigError for a kind
    of device that none describes."""
    if profile.device not in _USUAL:
        raise ConfigError(
            f"profile {profile.name}: no file in configs/hardware describes device {profile.device}: "
            f"name one with --hardware ({', '.join(_known())})"
        )
    return load_hardware(_USUAL[profile.device])


def others_of(hardware: Hardware) -> dict[str, Hardware]:
    """The other files of configs/hardware that describe the same device, by name."""
    described = {name: load_hardware(name) for name in _known()}
    return {name: one for name, one in described.items() if one.device == hardware.device and one != hardware}


def _known() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))
