"""What a wrong settings file says: the file, the key, the fix."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from common.config import (
    DecodeConfig,
    DeviceProfile,
    FastDllm,
    find_config,
    load_profile,
    load_profile_and_run,
    load_sweep,
    recorded,
    renewed,
)
from common.config.files import load_run
from common.config.strategies import Strategy
from common.errors import ConfigError
from common.policies.settings import settings_of

ROOT = Path(__file__).resolve().parents[3]
PROFILE = "name: p\nengine: lopa_cuda\ndevice: cpu\n"


def message_for(tmp_path: Path, text: str, *overrides: str, profile: bool = False) -> str:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        (load_profile if profile else load_run)(path, overrides)
    message = str(caught.value)
    assert str(path) in message or "--set" in message
    return message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: m\ndecode: {block_size: true}", "FILE: decode.block_size: set it to a number, not to true or false"),
        (
            "model: m\ndecode: {temperature: false}",
            "FILE: decode.temperature: set it to a number, not to true or false",
        ),
        ("model: m\ndecode: {top_k: 257, temperature: 1}", "FILE: decode.top_k: set it to 256 or less (given 257)"),
        ("model: m\ndecode: {top_k: true, temperature: 1}", "FILE: decode.top_k: set it to a number, not to true"),
        ("model: m\nseed: true", "FILE: seed: set it to a number, not to true or false"),
        ("model: m\ndecode: {temperature: .inf}", "FILE: decode.temperature: set it to a finite number"),
        ("model: m\ndecode: {temperature: .nan}", "FILE: decode.temperature: set it to a finite number"),
        ("model: m\ndecode: {temperature: 1e300}", "FILE: decode.temperature: set it to 100.0 or less"),
        ("model: m\ndecode: {temperature: 1e-40, top_p: 0.5}", "FILE: decode: top_p and top_k only act with temper"),
        ("model: m\ndecode: {num_lookahead: 1001}", "FILE: decode.num_lookahead: set it to 1000 or less (given 1001)"),
        (
            "model: m\ndecode: {strategy: fast_dllm, fill_rule: factor(f=1e38)}",
            "FILE: decode.fill_rule: factor: set f to a number above 0, at most 1000000",
        ),
        (
            "model: m\ndecode: {strategy: fast_dllm, fill_rule: static(steps=1.5)}",
            "FILE: decode.fill_rule: static: set steps to a whole number",
        ),
        (
            "model: m\ndecode: {strategy: {name: block_diffusion, penalty_lambda: 1}}",
            "FILE: decode.strategy: penalty_lambda only acts with edit_threshold: set that",
        ),
        ("model: m\ncommit: fused", "FILE: commit: unknown key; write it as decode.strategy.commit"),
        ("model: m\nserve: {keep_alive_s: 1e-40}", "FILE: serve.keep_alive_s: set it to 0.1 or more"),
        (
            "model: m\ndecode: {branch_score: 'hedged(risk=1e308)'}",
            "FILE: decode.branch_score: hedged: set risk to a number between -1000000 and 1000000",
        ),
        (
            "model: m\ndecode: {spawn_rule: 'near(probability=9)'}",
            "FILE: decode.spawn_rule: near: set probability to a number between 0 and 1",
        ),
        (
            "model: m\ndecode: {branch_score: 'ripple(trust=-4)'}",
            "FILE: decode.branch_score: ripple: set trust to a number between 0 and 1000000",
        ),
        ('model: m\ndecode: {num_lookahead: "-1"}', "FILE: decode.num_lookahead: set it to 0 or more"),
        ('model: m\ndecode: {num_lookahead: "-3"}', "FILE: decode.num_lookahead: set it to 0 or more"),
        (
            "model: m\ndecode: {mask_token_id: 3, eos_token_id: 3}",
            "FILE: decode: mask_token_id and eos_token_id are both 3",
        ),
        ("model: ''", "FILE: model: write at least 1 character"),
        ("model: m\ninput: {path: ''}", "FILE: input.path: write at least 1 character"),
        ("a: 2024-13-99\nmodel: m", "FILE: not valid YAML (month must be in 1..12)"),
        ("model: &m [*m]", "FILE: not valid YAML ("),
        (
            "model: m\ndecode: &m {x: *m}",
            "FILE: not valid YAML (nested more than 20 deep, or an alias that holds itself",
        ),
        ("model: " + "[" * 3000 + "]" * 3000, "FILE: not valid YAML (nested too deeply)"),
        ("model: " + "[" * 40 + "]" * 40, "FILE: not valid YAML (nested more than 20 deep"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{y}: &{y} [{','.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghi")),
            "FILE: not valid YAML (more than 10000 values: settings have fewer)",
        ),
        ("model: [" + "1," * 10**5 + "]", "FILE: not valid YAML (more than 10000 values: settings have fewer)"),
        ("model: m\ndecode: {max_steps: 9223372036854775808}", "FILE: decode.max_steps: set it to less than 2^63"),
        ("seed: !!bool x", "FILE: not valid YAML (a value does not fit its tag ('x'): remove the tag)"),
        ("seed: !!int ''", "FILE: not valid YAML (a value does not fit its tag ("),
        ("seed: !!float '_'", "FILE: not valid YAML ("),
        ("decode: {temperature: 1" + ":00" * 200 + ".5}", "FILE: not valid YAML (a value does not fit its tag ("),
        ("model: m\nseed: 0x" + "f" * 5000, "a number of thousands of digits"),
        ("seed: !!timestamp x", "FILE: not valid YAML (a value does not fit its tag ("),
        ("model: m # " + "x" * 2**20, "FILE: larger than a settings file can be (1 MiB)"),
        ('model: m\n"a\\nb": 1', "FILE: a b: unknown key"),
        ("model: m\nmodel: n", "FILE: not valid YAML (line 2, column 1: the key model stands there twice)"),
        ("decode: {}", "FILE: model: this key is missing: add it"),
        ("model: m\nyes: 1", "FILE: 1: write the key as text, in quotes if need be (given True)"),
        ("model: m\ndecod: {}", "FILE: decod: unknown key; did you mean decode?"),
        ("model: m\nxyz: 1", "FILE: xyz: unknown key; known keys: model, lora_path, "),
        ("model: m\nskip_treshold: 1", "FILE: skip_treshold: unknown key; did you mean decode.skip_threshold?"),
        ("model: m\nblock_size: 16", "FILE: block_size: unknown key; write it as decode.block_size"),
        (
            "model: m\ndecode.block_size: 16",
            "FILE: decode.block_size: unknown key; in a file it stands in its section: ",
        ),
        ("model: m\ndecode: {strategy.cache: dual}", "in its section: decode: {strategy: {cache: ...}}"),
        ("model: m\ndecode: {tau: 1}", "FILE: decode.tau: unknown key; known keys of decode: strategy, num_lookahead"),
        ("model: m\ndecode: {block_size: 0}", "FILE: decode.block_size: set it to 1 or more (given 0)"),
        (
            "model: m\ndecode: {stop: ['']}",
            "FILE: decode.stop: an empty stop string stops before the first token: remove it",
        ),
        ("model: m\ndecode: {num_lookahead: -1}", "FILE: decode.num_lookahead: set it to 0 or more"),
        ("model: m\ndecode: {num_lookahead: -1.0}", "FILE: decode.num_lookahead: set it to 0 or more"),
        ("model: m\ndecode: {num_lookahead: x}", "FILE: decode.num_lookahead: set it to a whole number (given 'x')"),
        ("model: m\ndecode: {skip_threshold: 2}", "FILE: decode.skip_threshold: set it to 1.0 or less (given 2)"),
        (
            "model: m\ndecode: {strategy: d3f}",
            "FILE: decode.strategy: did you mean d2f? set it to d2f, multi_block, fast_dllm, vanilla,",
        ),
        ("model: m\ndecode: {stop: END}", "FILE: decode.stop: write it as a list (given 'END')"),
        ("model: m\ndecode: [1]", "FILE: decode: write it as a section of settings"),
        (
            "model: m\ndecode: {branching_factor: 7}",
            "FILE: decode.branching_factor: published scripts use it for both k",
        ),
        ("model: m\ntrust_remote_code: true", "FILE: trust_remote_code: code from a checkpoint folder is never run"),
        ("model: m\ndecode: {sampling_strategy: none}", "ranked by token confidence: set it to default, margin or neg"),
        (
            "model: m\ndecode: {block_size: 64, max_new_tokens: 32}",
            "FILE: decode: block_size 64 is larger than max_new",
        ),
        ("model: m\ndecode: {top_p: 0.5}", "top_p and top_k only act with temperature > 0"),
        (
            "model: m\ndecode: {strategy: {cache: dual}}",
            "FILE: decode.strategy.cache: it is a key of strategy fast_dllm and block_diffusion and fast_dllm_v2",
        ),
        ("model: m\ndecode: {branch_score: random(bottom_share=0.5)}", "random takes created, as in random(created=1)"),
        (
            "model: m\npreset: d3llm\ndecode: {strategy: vanilla, sampling_strategy: margin}",
            "not margin (decode has the settings of preset d3llm too)",
        ),
        ("# nothing", "FILE: expected settings as key: value, found nothing"),
        ("- a list", "FILE: expected settings as key: value, found a list"),
        (
            "a: [",
            "FILE: not valid YAML (line 1, column 5: expected the node content, but found '<stream end>', while "
            "parsing a flow node)",
        ),
        ("model: m\na: b: c", "FILE: not valid YAML (line 2, column 5: mapping values are not allowed here)"),
        ("a: \x07", "FILE: not valid YAML (character 0x7 at position 3: special characters are not allowed)"),
        ("a: *b", "FILE: not valid YAML (line 1, column 4: found undefined alias 'b')"),
        ("model: m\nseed: 1\nmodel: n", "FILE: not valid YAML (line 3, column 1: the key model stands there twice)"),
    ],
)
def test_a_wrong_run_file_is_refused_with_the_fix(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_for(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh: {tensor_parallel_size: 0}", "FILE: mesh.tensor_parallel_size: set it to 1 or more (given 0)"),
        ("mesh: {tp: 2}", "FILE: mesh.tp: unknown key; known keys of mesh: data_parallel_size, branch_parallel_size"),
        ("mesh: all", "FILE: mesh: write it as a section"),
        ("graph: {mode: cuda_graph}", "FILE: graph.mode cuda_graph needs device cuda: set graph.mode to eager"),
        ("quantize_lm_head: true", "FILE: quantize_lm_head needs quantization: set it to w8a8 or fp8, or remove"),
        ("npu: {weight_prefetch_mb: 18}", "FILE: npu.weight_prefetch_mb acts on npu only, and device is cpu: remove"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_fix(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_for(tmp_path, PROFILE + text, profile=True)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.num_lookahead", "--set decode.num_lookahead: write key=value"),
        ("model.x=1", "--set model.x=1: model is a single value, not a section"),
        ("seed=[", "--set seed=[: the value is not valid YAML (line 1, column 2: expected the node content"),
        (
            "decode={a: 1, a: 2}",
            "the value is not valid YAML (line 1, column 8: the key a stands there twice); quote it",
        ),
        ("decode.block_size=0", "--set decode.block_size=0: decode.block_size: set it to 1 or more (given 0)"),
        ("decode.tau=1", "--set decode.tau=1: decode.tau: unknown key; known keys of decode: strategy, num_lookahead"),
        ("decode={tau: 1}", "--set decode={tau: 1}: decode.tau: unknown key"),
        ("decod.block_size=8", "--set decod.block_size=8: decod: unknown key; did you mean decode?"),
        ("decode.branching_factor=7", "--set decode.branching_factor=7: decode.branching_factor: published scripts"),
        ("decode.stop=[a, 3]", "--set decode.stop=[a, 3]: decode.stop.1: write it as text"),
        ("preset=nope", "--set preset=nope: preset: nope: no such file"),
        ('decode.stop=["\\ud800"]', "decode.stop: '\\ud800' holds half a surrogate pair"),
        ("decode.top_p=0.5", "FILE with --set decode.top_p=0.5: decode: top_p and top_k only act with temperature > 0"),
    ],
)
def test_a_wrong_override_is_refused_with_the_fix(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in message_for(tmp_path, "model: m", override)


def test_what_is_wrong_with_the_file_is_not_said_of_an_override(tmp_path: Path) -> None:
    message = message_for(tmp_path, "model: m\ndecode: {tau: 1}", "decode.block_size=8", "seed=3")
    assert message.startswith("FILE: decode.tau: unknown key")


def test_a_wrong_override_of_a_profile_is_named_too(tmp_path: Path) -> None:
    for name, text in (("p", PROFILE), ("r", "model: m")):
        (tmp_path / name).write_text(text)
    for override in ("mesh.tp=2", "max_model_len=0"):
        with pytest.raises(ConfigError, match=f"^--set {override}: {override.partition('=')[0]}: "):
            load_profile_and_run(tmp_path / "p", tmp_path / "r", [override])


def test_an_override_reaches_the_file_that_its_key_belongs_to(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PROFILE)
    (tmp_path / "r.yaml").write_text("model: m\ndecode: {num_lookahead: 1}")
    overrides = ["decode.num_lookahead=7", "mesh.branch_parallel_size=2", "input.path=a.jsonl", "dtype=float32"]
    profile, run = load_profile_and_run(tmp_path / "p.yaml", tmp_path / "r.yaml", overrides)
    assert run.decode.num_lookahead == 7
    assert run.input is not None and run.input.path == "a.jsonl"
    assert profile.mesh != "auto" and profile.mesh.branch_parallel_size == 2
    assert profile.dtype == "float32"


def test_a_name_finds_its_file_and_an_unknown_one_lists_those_there_are(tmp_path: Path) -> None:
    assert find_config("profiles", "cpu") == ROOT / "configs/profiles/cpu.yaml"
    assert find_config("profiles", tmp_path / "../x" / ".." / __file__) == Path(__file__)
    with pytest.raises(
        ConfigError, match=r"nope: no such file, and not one of the profiles in .*configs/profiles \(.*cpu"
    ):
        find_config("profiles", "nope")
    for impossible in ("x" * 5000, "a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="no such file, and not one of the profiles"):
            find_config("profiles", impossible)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: no regular file, and not one of the profiles"):
        find_config("profiles", tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: no regular file"):
        load_profile(tmp_path / "pipe")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_profile_loads_under_its_own_name(path: Path) -> None:
    assert load_profile(path).name == path.stem


@pytest.mark.parametrize("path", sorted((ROOT / "configs/runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_run_loads(path: Path) -> None:
    run = load_run(path)
    assert run.input is not None and run.output is not None


@pytest.mark.parametrize("path", sorted((ROOT / "configs/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_sweep_fits_the_demo_run(path: Path) -> None:
    assert load_sweep(path, "cpu", "demo").points


def test_booleans_of_the_environment_become_the_words_that_programs_expect(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE + "environment: {A: true, B: 0, C: AIV}")
    assert load_profile(path).environment == {"A": "true", "B": "0", "C": "AIV"}


def test_merge_keys_work_and_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndecode:\n  <<: {block_size: 8, skip_threshold: 0.5}\n  block_size: 16\n")
    decode = load_run(path).decode
    assert (decode.block_size, decode.skip_threshold) == (16, 0.5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("input.path=-", "-"),
        ("input.path={a}", "{a}"),
        ("input.path=1.0", "1.0"),
        ("input.path='quoted'", "quoted"),
        ("input.path=a #1.jsonl", "a #1.jsonl"),
        ("input.path=#1", "#1"),
        ("input.path=a\n b", "a\n b"),
        ("input.path=&a b", "&a b"),
        ("input.path='a' b", "'a' b"),
    ],
)
def test_what_is_a_text_needs_no_quotes_in_quotes(tmp_path: Path, override: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\n")
    run = load_run(path, [override])
    assert run.input is not None and run.input.path == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("graph: {token_buckets: [-5]}", "FILE: graph.token_buckets.0: set it to 1 or more"),
        ("npu: {row_buckets: [0]}", "FILE: npu.row_buckets.0: set it to 1 or more"),
        ("graph: {token_buckets: [true]}", "FILE: graph.token_buckets.0: set it to a number, not to true or false"),
        ("collective_timeout_s: .inf", "FILE: collective_timeout_s: set it to a finite number"),
        ("environment: {'': x}", "FILE: environment: '' cannot be a variable"),
        ('environment: {A: "\\ud800"}', "FILE: environment.A: '\\ud800' holds half a surrogate pair"),
        ("environment: {A: [1]}", "FILE: environment.A: write it as text, in quotes if need be (given [1])"),
        ("environment: {A: null}", "FILE: environment.A: write it as text, in quotes if need be (given None)"),
        ("environment: {OMP_NUM_THREADS: ²}", "FILE: environment: OMP_NUM_THREADS is '²': set it to a number of"),
        ("environment: {OMP_NUM_THREADS: abc}", "FILE: environment: OMP_NUM_THREADS is 'abc': set it to a number of"),
        ("npu: {max_graphs: 3}", "FILE: npu has settings of engine lopa_ascend, and device is cpu: remove them"),
        ("max_model_len: true", "FILE: max_model_len: set it to a number, not to true or false"),
    ],
)
def test_nonsense_in_a_profile_is_refused_by_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_for(tmp_path, PROFILE + text, profile=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rows: [{name: ''}]", "rows.0.name: write at least 1 character"),
        ("rows: [{name: '...'}]", "a row is called '...': give it a name"),
        ("rows: [{name: a, decode: {foo: 1}}]", "row 'a': decode.foo: unknown key"),
        ("rows: [{name: a, decode: {block_size: true}}]", "row 'a': decode.block_size: set it to a number"),
        ("rows: [{name: a, profle: cpu}]", "unknown key; did you mean profile?"),
        ("rows: [{name: a, set: {input.pat: x}}]", "row 'a': set input.pat=\"x\": input.pat: unknown key"),
        ("set: {seed: x}\nrows: [{name: a}]", "row 'a': set seed=\"x\": seed: set it to a whole number"),
        ("rows: [{name: a, set: {nonsense: 1}}]", "nonsense: unknown key"),
        ("folder: q\nrows: [{name: a, set: {output.path: x}}]", "row 'a': output.path: a row's file is named after it"),
        ("rows: [{name: a, set: {output: {path: x}}}]", "row 'a': output.path: a row's file is named after it"),
        ("set: {output.metrics_path: x}\nrows: [{name: a}]", "row 'a': output.metrics_path: a row's numbers are"),
        ("rows: [{name: a}, {name: A}]", "rows 'a' and 'A' both write to a.jsonl: rename or remove one"),
        ("grid: {decode.top_k: [1]}", "decode.top_k: in grid and zip all is of decode: write top_k"),
        ("rows: []", "no settings to compare; add rows, a grid or a zip"),
        ("grid: {block_size: []}", "grid.block_size: its list is empty, so that there is no setting: add a value"),
        ("zip: {block_size: [16], skip_threshold: []}", "zip.skip_threshold: its list is empty"),
        ("zip: {block_size: [16], skip_threshold: [0.9, 1]}", "but block_size has 1, skip_threshold has 2 values"),
        ("grid: {block_size: [16]}\nzip: {block_size: [16]}", "block_size is in grid and in zip"),
        (
            f"grid: {{block_size: {[*range(200)]}, num_lookahead: {[*range(200)]}}}",
            "grid and zip span 40000 settings, at most 10000: take values away",
        ),
        ("folder: //\nrows: [{name: a}]", "folder //: the root of the file system: name a folder in it"),
        ("set: {output.path: .}\nrows: [{name: a}]", "output.path .: a folder without a name of its own"),
        (f"rows: [{{name: a}}, {{name: {'x' * 300}}}]", "a row's name of more than 200 bytes, 'xxx"),
        ("grid: {block_sice: [16]}", "row 'block_sice=16': decode.block_sice: unknown key; did you mean block_size?"),
    ],
)
def test_a_sweep_names_row_and_key(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_sweep(path, "cpu", "demo")


def test_a_sentence_is_one_printable_line_of_bounded_length_whatever_it_names() -> None:
    odd = "a\nb\u2028c\x1b[2J\u200b\ud800\x00é 🙂"
    assert str(ConfigError(f"{odd}: correct it")) == r"a b c\x1b[2J\u200b\ud800\x00é 🙂: correct it"
    endless = str(ConfigError(f"in.jsonl: {'x' * 10**6}: correct it"))
    assert endless.startswith("in.jsonl: xxx") and endless.endswith("xxx: correct it") and len(endless) < 2000


def test_a_preset_stands_for_what_the_run_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("model: m\npreset: sdar\ndecode: {block_size: 16}")
    decode = load_run(path, ["decode.num_lookahead=7"]).decode
    assert (decode.strategy.name, decode.block_size, decode.num_lookahead) == ("block_diffusion", 16, 7)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("decode: {skip_treshold: 0.9}", "PRESET: decode.skip_treshold: unknown key; did you mean skip_threshold?"),
        ("decode: {skip_threshold: 1.8}", "PRESET: decode.skip_threshold: set it to 1.0 or less (given 1.8)"),
        ("decode: {block_size: 4}\nseed: 1", "PRESET: seed: a preset has decode only; write this in the run file"),
        ("decode: 3", "PRESET: expected a mapping called decode, the settings of a family"),
        (
            "decode: {strategy: {name: fast_dllm_v2, commit: separate}}",
            "PRESET: decode.strategy.commit: it is a key of strategy block_diffusion, not of fast_dllm_v2",
        ),
        ("decode: {strategy: d2f, window_attention: full, fill_rule: static}", "FILE: decode: fill_rule static is for"),
        ("decode: {entropy_bound: 0.3}", "PRESET: decode: entropy_bound is no key of decode any more: write fill"),
    ],
)
def test_a_wrong_preset_is_named_itself(tmp_path: Path, preset: str, expected: str) -> None:
    (tmp_path / "preset.yaml").write_text(preset)
    (tmp_path / "file.yaml").write_text(f"model: m\npreset: {tmp_path / 'preset.yaml'}")
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path / "file.yaml")
    message = str(caught.value).replace(str(tmp_path / "preset.yaml"), "PRESET")
    assert message.replace(str(tmp_path / "file.yaml"), "FILE").startswith(expected)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/presets").glob("*.yaml")))
def test_a_shipped_preset_stands_on_its_own(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"model: m\npreset: {name}")
    decode = load_run(path).decode
    assert decode.sampling_strategy == ("neg_entropy" if decode.fill_rule == "entropy" else "default")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("strategy: llada2", None),
        ("strategy: block_diffusion", {"edit_threshold": 0.5, "commit": "fused"}),
        ("strategy: {edit_threshold: 0.7}", {"edit_threshold": 0.7}),
        ("strategy: {name: block_diffusion, commit: separate}", {"edit_threshold": 0.5, "commit": "separate"}),
        ("strategy: fast_dllm_v2", {"name": "fast_dllm_v2", "sub_block_size": None}),
    ],
)
def test_keys_of_a_strategy_stay_while_its_name_does(
    tmp_path: Path, own: str, expected: dict[str, object] | None
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"model: m\npreset: llada2_1_quality\ndecode: {{{own}}}")
    if expected is None:
        with pytest.raises(ConfigError, match=r"decode\.strategy: set it to d2f, multi_block"):
            load_run(path)
    else:
        strategy = load_run(path).decode.strategy
        assert {name: getattr(strategy, name) for name in expected} == expected


def test_an_override_sets_a_key_of_a_strategy_that_the_file_only_names(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("model: m\ndecode: {strategy: fast_dllm}")
    strategy = load_run(path, ["decode.strategy.cache=dual", "decode.strategy.min_block_steps=2"]).decode.strategy
    assert strategy.model_dump() == {
        "name": "fast_dllm", "cache": "dual", "cfg_scale": 0, "min_block_steps": 2, "max_block_steps": None,
        "survival_margin": None,
    }  # fmt: skip
    assert load_run(path).decode.model_dump()["strategy"] == "fast_dllm"


def test_a_grid_spans_keys_of_a_strategy(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("decode: {strategy: fast_dllm}\ngrid: {strategy.cache: [prefix, none], num_lookahead: [0, 1]}")
    points = load_sweep(path, "cpu", "demo").points
    assert [(point.run.decode.strategy.cached, point.run.decode.num_lookahead) for point in points] == [
        ("prefix", 0), ("prefix", 1), ("none", 0), ("none", 1),
    ]  # fmt: skip
    assert points[0].name == "strategy.cache=prefix, num_lookahead=0"


def test_a_section_and_its_keys_are_merged_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    strategies = "strategy: [{name: fast_dllm, min_block_steps: 2}]"
    for text in (
        f"grid: {{strategy.cache: [prefix, dual], {strategies}}}",
        f"grid: {{{strategies}, strategy.cache: [prefix, dual]}}",
        f"grid: {{strategy.cache: [prefix, dual]}}\nzip: {{{strategies}}}",
    ):
        path.write_text(text)
        found = [point.run.decode.strategy.unusual() for point in load_sweep(path, "cpu", "demo").points]
        assert found == [{"min_block_steps": 2}, {"min_block_steps": 2, "cache": "dual"}]


@pytest.mark.parametrize("folder", ["outputs/study/", "outputs/study", "outputs/\U0001f600", "a\u2028\x85b"])
def test_a_sweeps_folder_and_texts_are_taken_as_they_stand(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "sweep.yaml"
    own = {"folder": folder, "set": {"input.prompt_template": f"{folder} {{question}}"}, "rows": [{"name": "a"}]}
    path.write_text(yaml.safe_dump(own))
    (point,) = (sweep := load_sweep(path, "cpu", "demo")).points
    assert sweep.folder == Path(folder) and point.run.input is not None
    assert point.run.input.prompt_template == f"{folder} {{question}}"


def test_a_sweeps_records_have_what_its_run_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("folder: results\nset: {output.step_map: true}\nrows: [{name: a}, {name: b}]")
    outputs = [point.run.output for point in load_sweep(path, "cpu", "demo").points]
    assert [(output.path, output.step_map) for output in outputs if output] == [
        ("results/a.jsonl", True), ("results/b.jsonl", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "folder"),
    [
        ("output.step_map=true", "outputs/demo/sweep"),
        ("output.path=x/y.jsonl", "x/y"),
        ("output={path: x/y.jsonl, step_map: true}", "x/y"),
    ],
)
def test_only_a_path_says_where_results_go(tmp_path: Path, override: str, folder: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("rows: [{name: a}]")
    assert load_sweep(path, "cpu", "demo", [override]).folder == Path(folder)
    key, _, value = override.partition("=")
    path.write_text(f"set: {{{key}: {value}}}\nrows: [{{name: a}}]")
    assert load_sweep(path, "cpu", "demo").folder == Path(folder)


def test_rows_with_long_settings_that_begin_alike_keep_their_own(tmp_path: Path) -> None:
    path, long = tmp_path / "sweep.yaml", "a" * 300
    path.write_text(
        "rows:\n"
        + "".join(f'  - {{name: {end}, set: {{input.prompt_template: "{long} {{question}} {end}"}}}}\n' for end in "xy")
    )
    templates = [point.run.input.prompt_template for point in load_sweep(path, "cpu", "demo").points if point.run.input]
    assert templates == [f"{long} {{question}} x", f"{long} {{question}} y"]


OLD = {
    "commit: separate": "commit is no key of decode any more: write strategy: {name: block_diffusion, commit: separ",
    "strategy: fast_dllm, cache: dual, min_block_steps: 2": "cache and min_block_steps are no keys of decode any more: "
    "write strategy: {name: fast_dllm, cache: dual, min_block_steps: 2}",
    "cache: prefix, strategy: {name: fast_dllm, cache: dual}": "write strategy: {name: fast_dllm, cache: prefix}",
    "strategy: vanilla, commit: separate": "commit is no key of decode any more: remove it",
    "fill_rule: dynamic, denoising_steps: 8": "write fill_rule: dynamic(steps=8)",
    "denoising_steps: null": "write fill_rule: static",
    "bottom_share: 0.5, creation_weight: 0.25": "write branch_score: mean(bottom_share=0.5, created=0.25)",
    "branch_score: hedged(risk=1), creation_weight: 0.25": "write branch_score: hedged(risk=1, created=0.25)",
    "spawn_rule: random, spawn_blocks: first": "write spawn_rule: random(blocks=1)",
    "reuse_prefix: true": "write strategy: {name: d2f, reuse_prefix: true}",
    "num_lookahead: auto": "the run's pace says that now: remove this, and set pace to balanced",
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_key_of_decode_ends_in_the_new_spelling(tmp_path: Path, old: str) -> None:
    assert OLD[old] in message_for(tmp_path, f"model: m\ndecode: {{{old}}}")
    assert OLD[old] in message_for(tmp_path, "model: m", f"decode={{{old}}}")
    with pytest.raises(ValidationError, match=re.escape(OLD[old])):
        DecodeConfig.model_validate(yaml.safe_load(f"{{{old}}}"))
    (tmp_path / "sweep.yaml").write_text(f"rows: [{{name: a, decode: {{{old}}}}}]")
    with pytest.raises(ConfigError, match="row 'a': decode"):
        load_sweep(tmp_path / "sweep.yaml", "cpu", "demo")


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("enforce_eager: true", "enforce_eager is no key there any more: set graph.mode to eager"),
        ("processes_per_node: 2", "processes_per_node is no key there any more: set NNODES where it is started"),
        ("attention: auto", "attention is no key there any more: write it as npu.attention"),
        ("graph: {cache_dir: x}", "graph: cache_dir is no key there any more: write it as npu.cache_dir"),
    ],
)
def test_an_old_key_of_a_profile_ends_in_the_new_spelling(tmp_path: Path, old: str, expected: str) -> None:
    assert expected in message_for(tmp_path, PROFILE + old, profile=True)
    tree = yaml.safe_load(PROFILE + old)
    with pytest.raises(ValidationError, match="any more"):
        DeviceProfile.model_validate(tree)
    (tmp_path / "p").write_text(PROFILE)
    (tmp_path / "r").write_text("model: m")
    override = f"{next(iter(yaml.safe_load(old)))}={old.partition(': ')[2]}"
    with pytest.raises(ConfigError, match=re.escape(expected.removeprefix("graph: "))):
        load_profile_and_run(tmp_path / "p", tmp_path / "r", [override])


@pytest.mark.parametrize("key", ["max_prompts", "max_stop_strings"])
def test_a_limit_of_the_server_that_is_fixed_by_now_is_said_to_be(tmp_path: Path, key: str) -> None:
    message = message_for(tmp_path, f"model: m\nserve: {{{key}: 4}}")
    assert f"serve: {key} is no key of serve any more: the limit is fixed, remove the key" in message


def test_what_an_earlier_version_recorded_is_read_by_its_new_names() -> None:
    old = {"strategy": "fast_dllm", "cache": "dual", "commit": "fused", "fill_rule": "static", "denoising_steps": 4}
    old |= {"bottom_share": 1.0, "creation_weight": 0.0, "spawn_blocks": "all", "entropy_bound": 0.35, "block_size": 8}
    assert renewed(old) == {
        "strategy": {"name": "fast_dllm", "cache": "dual"}, "fill_rule": "static(steps=4)", "block_size": 8,
    }  # fmt: skip
    assert recorded(old)["strategy"] == FastDllm(cache="dual").model_dump()
    assert recorded({"strategy": "d2f", "cache": "prefix"})["strategy"] == "d2f"


def _strategies(parent: type[Strategy] = Strategy) -> list[type[Strategy]]:
    return [each for own in parent.__subclasses__() for each in (own, *_strategies(own))]


def test_no_integer_is_larger_than_the_loops_can_hold() -> None:
    names = {(kind, name) for kind in _strategies() for name in kind.model_fields} | {
        (DecodeConfig, name)
        for name in DecodeConfig.model_fields
        if name != "max_new_tokens"  # the context bounds it
    }
    num_tried = 0
    for kind, name in names:
        for value in (2**31, 2**63):
            try:
                made = kind(**{name: value})
                decode = made if isinstance(made, DecodeConfig) else DecodeConfig(strategy=made)
            except (ValidationError, ConfigError):
                num_tried += 1
                continue
            settings_of(decode)
    assert num_tried > 40
