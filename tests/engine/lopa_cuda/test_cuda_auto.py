"""Settings that the engine decides by measuring: the number of lookaheads, and the mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from common.checkpoint import check_tensor_parallel, load_model_config
from common.config import AUTO_LOOKAHEAD, DecodeConfig, DeviceProfile, RunConfig
from common.errors import ConfigError
from common.generate import with_paying_lookaheads
from common.platforms import build_engine
from lopa_cuda import budget
from lopa_cuda.mesh_choice import choose_mesh

MODEL = str(Path(__file__).parents[2] / "golden" / "model_a")
AUTO = DecodeConfig(num_lookahead="auto", block_size=8, max_new_tokens=32)  # type: ignore[arg-type]
DREAM = load_model_config(Path(__file__).parents[3] / "configs" / "models" / "dream_7b")
H200 = {"bytes_per_s": 4.29e12, "flops_per_s": 790e12}


def test_auto_survives_being_written_and_read() -> None:
    assert AUTO.num_lookahead == AUTO_LOOKAHEAD
    assert AUTO.model_dump()["num_lookahead"] == "auto"
    assert DecodeConfig.model_validate(AUTO.model_dump()) == AUTO


@pytest.mark.parametrize(
    ("milliseconds", "lookaheads"),
    [([4.5, 5.1, 6.2, 7.3, 9.8, 12.8], 1), ([5.0, 9.0], 0), ([5.0] * 8, 15), ([4.0, 4.0, 4.0, 4.0, 12.0], 3)],
)
def test_as_many_rows_are_used_as_their_tokens_pay_for(
    monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile, milliseconds: list[float], lookaheads: int
) -> None:
    times = iter(milliseconds)
    monkeypatch.setattr(budget, "_step_ms", lambda *_: next(times))
    engine = build_engine(cpu, RunConfig(model=MODEL, decode=AUTO))
    assert with_paying_lookaheads(AUTO, engine).num_lookahead == lookaheads


def test_a_generator_replaces_auto_by_a_number(cpu: DeviceProfile) -> None:
    engine = build_engine(cpu, RunConfig(model=MODEL, decode=AUTO))
    assert with_paying_lookaheads(AUTO, engine).num_lookahead >= 0


def test_an_engine_that_cannot_measure_asks_for_a_number() -> None:
    engine = SimpleNamespace(num_paying_lookaheads=lambda decode: None)
    with pytest.raises(ConfigError, match="set a number"):
        with_paying_lookaheads(AUTO, engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_lookahead", [0, 3, 7, 15])
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_the_chosen_mesh_uses_every_process_and_divides_the_heads(num_processes: int, num_lookahead: int) -> None:
    mesh = choose_mesh(num_processes, DREAM, DecodeConfig(num_lookahead=num_lookahead), 2, H200)
    assert mesh.num_processes == num_processes
    check_tensor_parallel(DREAM, mesh.tensor_parallel_size)


def test_few_branches_share_layers_and_many_share_branches() -> None:
    few = choose_mesh(4, DREAM, DecodeConfig(num_lookahead=0), 2, H200)
    many = choose_mesh(4, DREAM, DecodeConfig(num_lookahead=15), 2, H200)
    assert few.tensor_parallel_size > many.tensor_parallel_size
