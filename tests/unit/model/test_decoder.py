"""What building a decoder asks of the process that builds one."""

from __future__ import annotations

from started import python

BUILD = """
import sys

from common.config import DeviceProfile, MeshConfig, RunConfig
from common.platforms import build_engine

profile = DeviceProfile(name="start", engine="lopa_cuda", device="cpu", dtype="float32", mesh=MeshConfig())
build_engine(profile, RunConfig(model="models/demo")).close()
print(*sys.modules)
"""


def test_an_engine_starts_without_the_compiler_of_torch() -> None:
    """`torch._dynamo` and what it imports take two seconds; a random number drawn on the meta device imports it."""
    done = python("-c", BUILD, check=True)
    imported = done.stdout.split()
    assert "torch" in imported
    assert not {"torch._dynamo", "torch._inductor", "sympy", "transformers"} & {*imported}
