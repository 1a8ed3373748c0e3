"""`lopa quantize` on a tiny model: folders that read back, errors by layer, mistakes refused before any work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers
from typer.testing import CliRunner

from common.batch import run_batch
from common.checkpoint import SafetensorsFolder, load_model_config, quantizable
from common.checkpoint.rules import checkpoint_shapes
from common.commands.main import app
from common.commands.quantize.compare import PairedEngine
from common.commands.quantize.model import QuantizeRequest, quantize_model
from common.config import DeviceProfile, RunConfig
from common.decoding import GenerationRequest
from common.errors import ConfigError
from common.generate import Generator, build_generator
from common.runtime import synthetic_plan
from lopa_cuda.assemble import assemble
from quant.errors import QuantizationError
from quant.folder import float_tensors, load_quantized
from quant.folder.description import read_description
from quant.names import Layout
from tests.engine.families.passes import engine_of, first_pass, read

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "model_a"
QUANTIZED_TRACES = [
    ("sdar/01_dynamic_block4", "lopa_cuda"),
    ("sdar/01_dynamic_block4", "lopa_ascend"),
    ("llada/03_nocache_threshold", "lopa_cuda"),
    ("llada2/01_hf20_threshold", "lopa_cuda"),
    ("llada2_2/06_levenshtein", "lopa_cuda"),
    ("llada2_2/06_levenshtein", "lopa_ascend"),
]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model with a tokenizer: a byte is a token."""
    folder = tmp_path_factory.mktemp("model_a")
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"how much is {n}?", "final": n}) + "\n" for n in range(3)))
    return path


def run_config(model: Path, prompts: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": str(model),
            "decode": {"num_lookahead": 1, "block_size": 8, "max_new_tokens": 16},
            "input": {"path": str(prompts), "prompt_template": "{question}\n"},
        }
    )


def layout_of(model: Path) -> Layout:
    return quantizable(load_model_config(model))


def linears_of(folder: Path, model: Path) -> dict[str, torch.Tensor]:
    linears = load_quantized(folder, layout_of(model))
    return {name: tensor for linear in linears for name, tensor in linear.items()}


def request(model: Path, out: Path, /, **changed: Any) -> QuantizeRequest:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=512)
    return QuantizeRequest(**{"model": str(model), "out": str(out), "profile": profile, **changed})


def test_a_dynamic_folder_reads_back_and_its_errors_are_listed(model: Path, tmp_path: Path) -> None:
    text = quantize_model(request(model, tmp_path / "out"))
    loaded = linears_of(tmp_path / "out", model)
    assert loaded["layers.1.down_proj.weight"].dtype == torch.int8
    assert set(float_tensors(tmp_path / "out", layout_of(model)).names()) >= {"lm_head.weight", "model.norm.weight"}
    assert read_description(tmp_path / "out").scheme_of["model.layers.0.mlp.up_proj.weight"] == "W8A8_DYNAMIC"
    assert all(column in text for column in LINEARS)
    assert "14 linears in w8a8_dynamic" in text
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert report["comparison"] is None
    assert all(0 < linear["weight_error"] < 0.02 for linear in report["linears"])


def test_static_scales_come_from_decoding_the_calibration_prompts(model: Path, prompts: Path, tmp_path: Path) -> None:
    run = run_config(model, prompts)
    chosen = request(model, tmp_path / "out", scheme="w8a8", calibration=str(prompts), smooth=0.5, run=run)
    text = quantize_model(chosen)
    loaded = linears_of(tmp_path / "out", model)
    assert {"input_scale", "deq_scale", "quant_bias"} <= {name.rpartition(".")[2] for name in loaded}
    assert "outputs on the calibration's samples" in text
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert all(0 < linear["output_error"] < 0.1 for linear in report["linears"])
    assert report["comparison"]["agreement"] > 0.5


def test_a_folder_may_be_read_by_whoever_may_read_new_files(model: Path, tmp_path: Path) -> None:
    quantize_model(request(model, tmp_path / "out"))
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_a_calibration_decodes_as_the_models_run_does(tmp_path: Path) -> None:
    """A block-diffusion model is never decoded as d2f; settings of the run are taken beside the profile's."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tom has 12 apples.\\n"}\n')
    words = ["quantize", "demo_block", "--out", str(tmp_path / "out"), "--scheme", "w8a8", "--calibration"]
    more = [str(tmp_path / "prompts.jsonl"), "-p", "cpu", "--set", "decode.max_new_tokens=16", "--set", "dtype=float32"]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.exception
    assert "linears in w8a8;" in done.stdout


def test_the_report_compares_tokens_and_accuracy(model: Path, prompts: Path, tmp_path: Path) -> None:
    text = quantize_model(request(model, tmp_path / "out", run=run_config(model, prompts)))
    comparison = json.loads((tmp_path / "out/quantization_report.json").read_text())["comparison"]
    assert comparison["num_compared"] > 50
    assert 0.5 < comparison["agreement"] <= 1
    assert comparison["plain"]["accuracy"]["scored"] == comparison["quantized"]["accuracy"]["scored"] == 3
    assert "The same token at" in text and "| quantized |" in text


def test_a_model_agrees_with_itself_in_every_step() -> None:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=64)
    first, second = (assemble(profile, RunConfig(model=str(GOLDEN))) for _ in range(2))
    paired = PairedEngine(first, second)
    plan = synthetic_plan(load_model_config(GOLDEN), num_rows=2, width=12, num_cached=0, read_share=0.5)
    assert np.array_equal(paired.forward(plan).token_T, second.forward(plan).token_T)
    assert paired.num_equal == paired.num_compared == 12


def test_pairing_leaves_the_float_models_tokens_as_they_are(model: Path, prompts: Path, tmp_path: Path) -> None:
    quantize_model(request(model, tmp_path / "out"))
    run, profile = run_config(model, prompts), request(model, tmp_path).profile
    requests = [GenerationRequest(str(n), tuple(range(5 * n, 5 * n + 9))) for n in range(3)]

    def tokens_of(generator: Generator) -> list[object]:
        return [getattr(result, "token_ids", result) for result in generator.generate(requests)]

    quantized = profile.model_copy(update={"quantization": "w8a8"})
    other_run = run.model_copy(update={"model": str(tmp_path / "out")})
    with build_generator(profile, run) as alone, build_generator(quantized, other_run) as other:
        expected = tokens_of(alone)
        paired = PairedEngine(alone.engine, other.engine)
        beside = Generator(profile, alone.run, paired, alone.tokenizer, alone.model_config)
        assert tokens_of(beside) == expected
        assert 0 < paired.num_equal < paired.num_compared  # the other model is another one
        assert tokens_of(alone) == expected


def test_both_models_solve_the_same_problems(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do also if somebody rewrites the input between the two runs."""
    seen = []

    def run_and_rewrite(profile: DeviceProfile, run: RunConfig, build: Any) -> Any:
        assert run.input is not None
        seen.append(Path(run.input.path).read_text())
        own.write_text('{"question": "another", "final": 0}\n')
        return run_batch(profile, run, build)

    own = tmp_path / "problems.jsonl"
    own.write_text(prompts.read_text())
    monkeypatch.setattr("common.commands.quantize.compare.run_batch", run_and_rewrite)
    quantize_model(request(model, tmp_path / "out", run=run_config(model, own)))
    assert seen == [prompts.read_text()] * 2


def test_lora_is_merged_before_quantizing(model: Path, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    num_out, num_in = checkpoint_shapes(load_model_config(model))[f"{module}.weight"]
    a, b = torch.ones(2, num_in), torch.ones(num_out, 2)
    lora = tmp_path / "lora"
    lora.mkdir()
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, lora / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    exclude = ["layers.0.*", "layers.1.[ogd]*"]
    quantize_model(request(model, tmp_path / "out", lora=str(lora), exclude=exclude))
    merged = float_tensors(tmp_path / "out", layout_of(model)).read(f"{module}.weight")
    plain = SafetensorsFolder(model).read(f"{module}.weight")
    torch.testing.assert_close(merged, plain + 4.0)
    assert {name.rpartition(".")[0] for name in linears_of(tmp_path / "out", model)} == {"layers.1.qkv_proj"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "absent"}, "absent: no such folder; download"),
        ({"scheme": "w8a8"}, "scheme w8a8 needs --calibration FILE.jsonl"),
        ({"smooth": 0.5}, "smoothing needs --calibration FILE.jsonl"),
        ({"scheme": "int4"}, "scheme 'int4' is not known"),
        ({"scheme": "int4", "calibration": "never read"}, "scheme 'int4' is not known: use w8a8_dynamic or w8a8"),
        ({"exclude": ["layer.0"], "calibration": "never read"}, "exclude 'layer.0' names no linear"),
        (
            {"model": GOLDEN.parents[1] / "golden_families/llada2/model_a", "calibration": "never read"},
            r"experts are quantized without a calibration: give none, or exclude '\*\.experts\.\*'",
        ),
        ({"calibration": "absent.jsonl"}, "absent.jsonl: no such input file"),
        ({"lora": "absent"}, "absent"),
    ],
)
def test_mistakes_are_one_sentence(model: Path, tmp_path: Path, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, QuantizationError), match=sentence):
        quantize_model(request(model, tmp_path / "out", **changed))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "engine"), QUANTIZED_TRACES)
def test_a_folder_computes_what_quantizing_at_load_does(tmp_path: Path, name: str, engine: str) -> None:
    trace = read(name)
    plan = first_pass(trace, load_model_config(trace["folder"]))
    quantize_model(request(trace["folder"], tmp_path / "out"))
    profile = request(tmp_path, tmp_path).profile.model_copy(update={"quantization": "w8a8", "engine": engine})
    folders = trace["folder"], tmp_path / "out"
    at_load, folder = (
        engine_of(profile, {**trace, "folder": path}, window_attention="block_causal").forward(plan).values_3T
        for path in folders
    )
    assert np.array_equal(at_load, folder)


def test_a_full_folder_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        quantize_model(request(model, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_quantized_model_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    quantize_model(request(model, tmp_path / "once"))
    with pytest.raises(QuantizationError, match="already quantized; give the float model"):
        quantize_model(request(tmp_path / "once", tmp_path / "twice"))


def test_prompts_that_cannot_be_decoded_name_their_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"messages": [{"role": "user", "content": "?"}]}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl: .*no chat template"):
        quantize_model(request(model, tmp_path / "out", calibration=str(tmp_path / "bad.jsonl")))


def test_the_report_needs_problems_and_one_process(model: Path, prompts: Path, tmp_path: Path) -> None:
    run = run_config(model, prompts)
    with pytest.raises(ConfigError, match="no input section"):
        quantize_model(request(model, tmp_path / "out", run=run.model_copy(update={"input": None})))
    mesh = {"branch_parallel_size": 2}
    two = DeviceProfile.model_validate({"name": "two", "engine": "lopa_cuda", "device": "cpu", "mesh": mesh})
    with pytest.raises(ConfigError, match="profile two: calibration and report run in one process"):
        quantize_model(request(model, tmp_path / "out", run=run, profile=two))


@pytest.mark.slow
def test_the_script_quantizes_and_says_why_it_does_not(model: Path, tmp_path: Path) -> None:
    def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [ROOT / "scripts/quantize.sh", str(model), "--out", str(tmp_path / "out"), *arguments]
        environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    done = run_script("--exclude", "*.down_proj")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert "12 linears in w8a8_dynamic" in done.stdout
    again = run_script()
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "exists and is not empty; remove it or write elsewhere" in again.stderr
