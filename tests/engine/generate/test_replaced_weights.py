"""Weights that are replaced are those of a fresh start, to the bit, in every form in which an engine holds them. What
does not fit changes nothing. Memory that is given back is the machine's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from started import python

from common.checkpoint import load_model_config, quantizable
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import DropWeights, PutWeights, ReadWeights, ReleaseMemory, ResumeMemory, carry_out
from common.errors import ConfigError, EngineError
from common.generate import Generator, build_generator
from common.platforms import build_engine
from common.runtime import synthetic_plan
from quant.calibration import calibrate
from quant.quantize import quantize_folder
from tests.conftest import GOLDEN
from tests.other_weights import DEMO, other_tensors, write_other

MODEL = GOLDEN / "model_a"
EXPERTS = GOLDEN.with_name("golden_families") / "llada2" / "model_b"
QUESTION = "Tom has 12 apples and buys 5 more. How many apples does he have now?\n"
Change = Callable[[Path, dict[str, torch.Tensor]], None]
FORMS = [
    ("lopa_cuda", "float32", {}),
    ("lopa_cuda", "bfloat16", {}),
    ("lopa_cuda", "bfloat16", {"quantization": "w8a8", "quantize_lm_head": True}),
    ("lopa_cuda", "bfloat16", {"quantization": "fp8"}),
    ("lopa_ascend", "bfloat16", {}),
    ("lopa_ascend", "bfloat16", {"quantization": "w8a8", "quantize_lm_head": True}),
]


def engine_of(model: Path, engine: str = "lopa_cuda", dtype: str = "float32", **settings: Any) -> Any:
    profile = DeviceProfile(
        name="test", engine=engine, device="cpu", dtype=dtype, max_model_len=256, **settings  # type: ignore[arg-type]
    )  # fmt: skip
    causal = {"window_attention": "block_causal", "shift_row": "fresh"} if engine == "lopa_ascend" else {}
    decode = DecodeConfig(block_size=16, max_new_tokens=32, **causal)  # type: ignore[arg-type]
    return build_engine(profile, RunConfig(model=str(model), decode=decode, max_num_requests=2))


def predicted(engine: Any, model: Path = MODEL) -> np.ndarray:
    """Token, probability and confidence of every entry of a step."""
    plan = synthetic_plan(load_model_config(model), num_rows=2, width=32, num_cached=0, read_share=1.0, block_size=16)
    return np.array(engine.forward(plan).values_3T)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other(tmp_path_factory.mktemp("other") / "model", 10, MODEL)


@pytest.mark.parametrize(("engine", "dtype", "settings"), FORMS, ids=str)
def test_replaced_weights_predict_what_a_fresh_engine_does(
    engine: str, dtype: str, settings: dict[str, Any], other: Path
) -> None:
    """Captured graphs hold addresses: none changes, but of weights that lie in a layout which is not written to."""
    first, second = (predicted(engine_of(model, engine, dtype, **settings)) for model in (MODEL, other))
    assert not np.array_equal(first, second)
    running = engine_of(MODEL, engine, dtype, **settings)
    tensors = [*running.model.parameters(), *running.model.buffers()]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for source, expected in (
        (str(other), second), (str(MODEL), first), (load_file(other / "model.safetensors"), second), (str(MODEL), first)
    ):  # fmt: skip
        assert carry_out(running, ReadWeights(source)) is None
        assert carry_out(running, PutWeights()) is None
        np.testing.assert_array_equal(predicted(running), expected)
    assert running.weight_version == "4"
    after = [tensor.data_ptr() for tensor in (*running.model.parameters(), *running.model.buffers())]
    assert (addresses == after) == (engine != "lopa_ascend" or not settings)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "dtype", "settings"), FORMS, ids=str)
def test_memory_that_was_given_back_is_taken_again(
    engine: str, dtype: str, settings: dict[str, Any], other: Path
) -> None:
    first, second = (predicted(engine_of(model, engine, dtype, **settings)) for model in (MODEL, other))
    running = engine_of(MODEL, engine, dtype, **settings)
    assert carry_out(running, ReleaseMemory()) is None
    assert running.released == {"weights", "kv_cache"}
    held = [*running.model.parameters(), *running.model.buffers(), *running.cache.tensors]
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert carry_out(running, ReleaseMemory(("weights",))) is None, "it is given back already"
    assert carry_out(running, ResumeMemory(("weights",))) is None
    assert running.released == {"kv_cache"}
    assert carry_out(running, ResumeMemory()) is None
    np.testing.assert_array_equal(predicted(running), first)
    assert running.weight_version == "0" and not running.released
    assert carry_out(running, ReleaseMemory(("weights",))) is None
    for order in (ReadWeights(str(other)), PutWeights("second")):  # other weights take the memory themselves
        assert carry_out(running, order) is None
    np.testing.assert_array_equal(predicted(running), second)
    assert running.weight_version == "second" and not running.released


def _find_no_memory(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Have storages find no memory, but for so many first ones."""
    resize, taken = torch.UntypedStorage.resize_, []

    def scarce(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        taken.extend([num_bytes] * bool(num_bytes))
        if num_bytes and len(taken) > after:
            raise torch.OutOfMemoryError("out of memory")
        return resize(storage, num_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", scarce)


def test_memory_that_is_not_free_changes_nothing(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = predicted(engine_of(MODEL))
    running = engine_of(MODEL)
    held = [*running.model.parameters(), *running.model.buffers(), *running.cache.tensors]
    assert carry_out(running, ReleaseMemory()) is None
    orders = ReadWeights(str(other)), ResumeMemory(), ResumeMemory(("weights",)), ResumeMemory(("kv_cache",))
    for order, num_first in zip(orders, (1, 1, 1, 0), strict=True):  # the cache is one storage
        with monkeypatch.context() as patch:
            _find_no_memory(patch, after=num_first)
            assert "were given back and are not all free" in str(carry_out(running, order))
        assert running.released == {"weights", "kv_cache"}
        assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert carry_out(running, ResumeMemory(("kv_cache",))) is None
    assert running.released == {"weights"}, "what was read for an order that failed does not come into force"
    assert carry_out(running, ResumeMemory()) is None
    np.testing.assert_array_equal(predicted(running), first)
    assert running.weight_version == "0"


def test_other_memory_is_taken_without_the_weights_that_were_read(other: Path) -> None:
    first, second = (predicted(engine_of(model)) for model in (MODEL, other))
    running = engine_of(MODEL)
    assert carry_out(running, ReleaseMemory(("kv_cache",))) is None
    assert carry_out(running, ReadWeights(str(other))) is carry_out(running, ResumeMemory(("kv_cache",))) is None
    np.testing.assert_array_equal(predicted(running), first)
    assert carry_out(running, PutWeights()) is None
    np.testing.assert_array_equal(predicted(running), second)


def test_dropped_weights_give_their_memory_back(other: Path) -> None:
    running = engine_of(MODEL)
    assert carry_out(running, ReleaseMemory()) is carry_out(running, ReadWeights(str(other))) is None
    assert any(tensor.untyped_storage().nbytes() for tensor in running.model.parameters())
    assert carry_out(running, DropWeights()) is None
    assert not any(tensor.untyped_storage().nbytes() for tensor in running.model.parameters())
    assert running.released == {"weights", "kv_cache"}


def test_a_folder_that_was_damaged_meanwhile_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    quantize_folder(MODEL, folder, quantizable(load_model_config(MODEL)), "w8a8_dynamic")
    running = engine_of(folder, quantization="w8a8")
    before = predicted(running)
    assert carry_out(running, ReleaseMemory(("weights",))) is None
    whole = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    for path in whole:
        tensors = load_file(path)
        del tensors[next(name for name in tensors if name.endswith("weight_scale"))]
        save_file(tensors, path)
    assert carry_out(running, ResumeMemory()) is not None
    assert running.released == {"weights"}
    for path, content in whole.items():
        path.write_bytes(content)
    assert carry_out(running, ResumeMemory()) is None
    np.testing.assert_array_equal(predicted(running), before)


@pytest.mark.parametrize("engine", ["lopa_cuda", "lopa_ascend"])
def test_experts_are_replaced(engine: str, tmp_path: Path) -> None:
    changed = write_other(tmp_path / "other", 10, EXPERTS)
    first, second = (predicted(engine_of(one, engine, "bfloat16"), EXPERTS) for one in (EXPERTS, changed))
    running = engine_of(EXPERTS, engine, "bfloat16")
    for source, expected in ((changed, second), (EXPERTS, first)):
        assert carry_out(running, ReadWeights(str(source))) is carry_out(running, PutWeights()) is None
        np.testing.assert_array_equal(predicted(running, EXPERTS), expected)


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_a_folder_in_8_bits_is_replaced_by_one_that_was_quantized_alike(scheme: Any, tmp_path: Path) -> None:
    calibration = None
    if scheme == "w8a8":
        engine = engine_of(MODEL)
        calibration = calibrate(engine.model, [lambda: predicted(engine)])
    folders = []
    for number in (0, 10):
        source = write_other(tmp_path / f"float{number}", number, MODEL)
        folders.append(tmp_path / f"int8-{number}")
        quantize_folder(source, folders[-1], quantizable(load_model_config(source)), scheme, calibration)
    first, second = (predicted(engine_of(folder, quantization="w8a8")) for folder in folders)
    running = engine_of(folders[0], quantization="w8a8")
    for folder, expected in ((folders[1], second), (folders[0], first)):
        assert carry_out(running, ReadWeights(str(folder))) is carry_out(running, PutWeights()) is None
        np.testing.assert_array_equal(predicted(running), expected)
    for source, name in ((str(tmp_path / "float10"), "float10"), (other_tensors(10, MODEL), "the given tensors")):
        problem = carry_out(running, ReadWeights(source))
        if scheme == "w8a8":  # floats hold no ranges of activations
            assert f"{name}: linears would not be quantized as those of" in str(problem)
            np.testing.assert_array_equal(predicted(running), first)
        else:
            assert problem is carry_out(running, PutWeights()) is None
            np.testing.assert_array_equal(
                predicted(running), predicted(engine_of(tmp_path / "float10", quantization="w8a8"))
            )


def _lack(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _reshape(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def _make_integers(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def _spoil(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _be_wider(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))


def _be_a_lora(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))


def _have_a_lora(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_lack, "up_proj.weight: missing; the checkpoint is incomplete"),
        (_reshape, r"model.norm.weight: shape [63], but config.json says [64]"),
        (_make_integers, "lm_head.weight: holds torch.int8, quantized weights in a form that is not read"),
        (_spoil, "model.norm.weight: holds NaN or infinite values"),
        (_be_wider, "intermediate_size is 192 there and 160 in the model that runs: give weights of the same model"),
        (_be_a_lora, "a LoRA, not a model"),
        (_have_a_lora, "a LoRA beside the model's own weights"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_changes_nothing(change: Change, reason: str, tmp_path: Path) -> None:
    running = engine_of(MODEL)
    before = predicted(running)
    folder, tensors = write_other(tmp_path / "other", 10, MODEL), other_tensors(10, MODEL)
    change(folder, tensors)
    save_file(tensors, folder / "model.safetensors")
    assert reason in str(carry_out(running, ReadWeights(str(folder))))
    assert "no such folder" in str(carry_out(running, ReadWeights(str(folder / "none"))))
    np.testing.assert_array_equal(predicted(running), before)
    assert running.weight_version == "0"


def test_what_was_read_can_be_dropped(other: Path) -> None:
    running = engine_of(MODEL)
    before = predicted(running)
    assert carry_out(running, ReadWeights(str(other))) is carry_out(running, DropWeights()) is None
    np.testing.assert_array_equal(predicted(running), before)


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=320)
    decode = DecodeConfig(num_lookahead=1, block_size=16, max_new_tokens=32, skip_threshold=0.95)
    with build_generator(profile, RunConfig(model=str(DEMO), decode=decode)) as built:
        yield built


def test_a_python_user_replaces_weights_by_tensors_as_they_come(generator: Generator) -> None:
    """A trainer's buckets may use their memory again."""
    prompt = QUESTION
    first = generator.complete(prompt)

    def buckets(number: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in other_tensors(number).items():
            yield name, tensor
            tensor.zero_()

    generator.update_weights(buckets(6), "step-6")
    assert generator.complete(prompt) != first and generator.weight_version == "step-6"
    generator.update_weights(buckets(0))
    assert generator.complete(prompt) == first and generator.weight_version == "step-6+1"


def test_a_python_user_is_told_what_cannot_be(generator: Generator) -> None:
    first = generator.complete(QUESTION)
    with generator.decoding(), pytest.raises(EngineError, match="decoding already"):
        generator.update_weights_from_disk(str(DEMO))
    with pytest.raises(ConfigError, match=r"the given tensors: model\.embed_tokens\.weight: missing"):
        generator.update_weights({})
    with pytest.raises(ConfigError, match="is not a list of weights and kv_cache"):
        generator.release_memory_occupation(["graphs"])  # type: ignore[list-item]
    generator.update_weights(other_tensors(0))
    generator.release_memory_occupation()
    with pytest.raises(EngineError, match="the memory of kv_cache and weights has been given back: resume it first"):
        generator.complete(QUESTION)
    with pytest.raises(ConfigError, match="the weights came from memory and were not kept: update them instead"):
        generator.resume_memory_occupation()
    generator.update_weights_from_disk(str(DEMO))
    generator.resume_memory_occupation()
    assert generator.complete(QUESTION) == first


RESIDENT = """
import sys
from pathlib import Path
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import ReleaseMemory, ResumeMemory, carry_out
from common.platforms import build_engine

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

profile = DeviceProfile(name="test", engine=sys.argv[2], device="cpu", dtype="bfloat16", max_model_len=4096)
decode = DecodeConfig(window_attention="block_causal", shift_row="fresh")
engine = build_engine(profile, RunConfig(model=sys.argv[1], load_format="dummy", max_num_requests=16, decode=decode))
weights = sum(tensor.nbytes for tensor in engine.model.parameters())
for tensor in engine.cache.tensors:
    tensor.fill_(1)  # pages of zeros are none
found = [resident()]
for order in (ReleaseMemory(("weights",)), ReleaseMemory(("kv_cache",)), ResumeMemory()):
    assert carry_out(engine, order) is None
    found.append(resident())
print(weights, engine.cache.num_bytes, *found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lopa_cuda", "lopa_ascend"])
def test_released_memory_is_the_machines(engine: str, tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    wide = {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **wide}))
    printed = python("-c", RESIDENT, tmp_path, engine, check=True).stdout
    weights, cache, *resident = map(int, printed.split())
    assert weights > 100 * 2**20 and cache > 100 * 2**20
    full, without_weights, without_both, again = resident
    assert full - without_weights > 0.95 * weights, printed
    assert without_weights - without_both > 0.95 * cache, printed
    assert again < full + 0.1 * weights, printed
    print(printed)
