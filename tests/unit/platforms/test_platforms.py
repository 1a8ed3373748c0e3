"""The table of platforms: one line adds one, and what it cannot hold ends in a sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common import platforms
from common.config import DeviceProfile, RunConfig
from common.errors import EngineError
from common.platforms import Platform, all_platforms, build_engine, platform_of


def test_every_engine_and_device_of_a_profile_has_a_platform() -> None:
    found = [(platform.engine, platform.device) for platform in all_platforms()]
    wanted = {("lopa_cuda", "cpu"), ("lopa_cuda", "cuda"), ("lopa_ascend", "cpu"), ("lopa_ascend", "npu")}
    assert set(found) == wanted and len(found) == len(wanted)


def test_another_engine_is_one_package_and_one_line(monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile) -> None:
    class Third(Platform):
        engine, device = "lopa_third", "cpu"

        def build_engine(self, profile: DeviceProfile, run: RunConfig) -> str:  # type: ignore[override]
            return f"{profile.name} with {run.model}"

    package = SimpleNamespace(PLATFORMS=(Third(),))
    real = platforms.import_module
    monkeypatch.setattr(platforms, "import_module", lambda name: package if name == "third.platforms" else real(name))
    monkeypatch.setattr(platforms, "_PROVIDERS", (*platforms._PROVIDERS, "third.platforms"))
    all_platforms.cache_clear()
    try:
        profile = cpu.model_copy(update={"engine": "lopa_third"})
        assert platform_of(profile).engine == "lopa_third"
        assert build_engine(profile, RunConfig(model="m")) == "test with m"
    finally:
        all_platforms.cache_clear()


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried to allocate 2 GiB", "DefaultCPUAllocator: can't allocate memory"]
)
def test_a_model_that_does_not_fit_is_a_sentence(
    message: str, monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile
) -> None:
    def fail(profile: DeviceProfile, run: RunConfig) -> None:
        raise RuntimeError(message + "\nmore lines")

    monkeypatch.setattr(platform_of(cpu), "build_engine", fail)
    with pytest.raises(
        EngineError, match="m with max_num_requests 7 and max_model_len 512 does not fit the memory of cpu"
    ):
        build_engine(cpu, RunConfig(model="m", max_num_requests=7))


def test_another_error_of_an_engine_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile) -> None:
    def fail(profile: DeviceProfile, run: RunConfig) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(platform_of(cpu), "build_engine", fail)
    with pytest.raises(RuntimeError, match="a defect") as raised:
        build_engine(cpu, RunConfig(model="m"))
    assert not isinstance(raised.value, EngineError)
