"""A command begins with a model: names, flags, what is found out, and what is told where it cannot be."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import started
import yaml
from test_cli import lopa, write_run
from typer.testing import CliRunner

import common.commands.arguments.found as found
from common.commands.arguments.found import load_both
from common.commands.arguments.options import WholeNumber, save_run_file
from common.commands.arguments.shorthands import AT_ONCE, DECODING, LIMIT, OUTPUT
from common.commands.chat import _prompts
from common.commands.filling import Filling
from common.commands.main import app
from common.config import RunConfig, find_config, load_profile, load_profile_and_run, load_run
from common.errors import ConfigError
from common.tables import counted

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(found, "_DRIVERS", {})
    found.profile_here.cache_clear()
    yield
    found.profile_here.cache_clear()


def model_folder(tmp_path: Path, **fields: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


# What MODEL may be


def test_a_folder_is_a_run_by_its_familys_preset(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, model_type="sdar", block_size=16, max_position_embeddings=32768)
    run = load_run(folder)
    assert (run.model, run.preset, run.decode.block_size) == (str(folder), "sdar", 16)
    assert run.decode.strategy.name == "block_diffusion" and run.decode.max_new_tokens == 512
    assert load_run(folder, ["preset=llada2", "decode.block_size=32"]).decode.block_size == 32


def test_a_small_models_answers_leave_room_for_a_prompt(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, model_type="sdar", max_position_embeddings=512)
    assert load_run(folder).decode.max_new_tokens == 256


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 3}', '{"architectures": "x"}'])
def test_a_folder_whose_config_says_nothing_has_the_usual_settings(tmp_path: Path, text: str) -> None:
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(text)
    assert load_run(folder).preset is None


def test_a_model_folder_wins_over_nothing_and_a_run_file_over_it() -> None:
    assert find_config("runs", "demo") == ROOT / "configs" / "runs" / "demo.yaml"
    assert find_config("runs", DEMO) == DEMO


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Dream-org/Dream-v0", "for a repository of a hub write hf://Dream-org/Dream-v0, or modelscope://"),
        ("https://huggingface.co/a/b.c/tree/main", r"write hf://a/b\.c, or download it"),
        ("https://www.modelscope.cn/models/a/b", "write modelscope://a/b, or download it"),
        ("s3://bucket/a", "write hf://OWNER/NAME, or download it and name its folder"),
        ("deomo", r"not one of the runs in .*did you mean demo\? demo, demo_block"),
        (".", "a folder without a config.json, so not of a model"),
    ],
)
def test_what_is_no_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        load_run(name)


def test_a_folder_of_models_is_told_which_it_holds(tmp_path: Path) -> None:
    model_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"a folder without .*: give one of its folders, such as model"):
        load_run(tmp_path)


@pytest.mark.parametrize(("kind", "name"), [("profiles", "cpuu"), ("sweeps", "dmo"), ("presets", "lada")])
def test_other_names_have_their_did_you_mean_too(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        find_config(kind, name)  # type: ignore[arg-type]


def test_a_name_in_anothers_place_is_told_what_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"cpu: no such file or folder, and not one of the runs in .* \(it is one of the profiles"
    ):
        find_config("runs", "cpu")


def test_shipped_paths_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_run("demo")
    assert run.input is not None and Path(run.input.path) == DEMO / "heldout_math.jsonl" and Path(run.model) == DEMO
    assert load_run("demo", ["model=models/demo_block"]).model == str(ROOT / "models" / "demo_block")
    assert load_run("demo", ["model=models/../pyproject.toml"]).model == "models/../pyproject.toml"
    (tmp_path / "models" / "demo").mkdir(parents=True)
    assert load_run("demo").model == "models/demo", "what is here goes before"


def test_a_misspelt_key_is_told_before_the_one_that_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("modle: x\n")
    with pytest.raises(ConfigError, match=r"modle: unknown key; did you mean model\?"):
        load_run(tmp_path / "run.yaml")


# What is found out


def test_a_machine_without_an_accelerator_has_the_cpus_profile() -> None:
    assert found.profile_here() == "cpu"
    assert load_both(None, "demo", [])[0] == load_profile("cpu")


def test_a_driver_without_a_device_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "_DRIVERS", {"cuda": tmp_path, "npu": tmp_path / "none"})

    class Cards:
        num = 0

        def num_visible_devices(self) -> int:
            return self.num

    monkeypatch.setattr(found, "platform_of_device", lambda device: Cards())
    assert found.profile_here() == "cpu"
    found.profile_here.cache_clear()
    Cards.num = 1
    assert found.profile_here() == "cuda"
    assert load_both(None, "demo", [], takes_many=True)[1].max_num_requests == 16


def test_requests_at_once_are_found_out_unless_something_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\nmax_num_requests: 3\n")
    assert load_both("cpu", "demo", [], takes_many=True)[1].max_num_requests == 8
    assert load_both("cpu", "demo", ["max_num_requests=2"], takes_many=True)[1].max_num_requests == 2
    assert load_both("cpu", str(tmp_path / "run.yaml"), [], takes_many=True)[1].max_num_requests == 3
    assert load_both("cpu", "demo", [])[1].max_num_requests == 1


def test_a_large_models_threads_and_dtype_fit_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(2**30)
    monkeypatch.setattr(found, "memory_bytes", lambda: 64 * 2**30)
    profile, _ = load_both(None, str(folder), [])
    assert profile.dtype == "float32"
    assert profile.environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    monkeypatch.setattr(found, "memory_bytes", lambda: 2 * 2**30)
    assert load_both(None, str(folder), [])[0].dtype == "bfloat16"
    assert load_both(None, str(folder), ["dtype=float16"])[0].dtype == "float16", "what is given goes before"
    assert load_both("cpu", str(folder), [])[0] == load_profile("cpu"), "and a profile that is named stays as it is"


def test_d2f_is_block_causal_where_the_engine_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ascend.yaml").write_text("name: a\nengine: lopa_ascend\ndevice: cpu\n")
    profile = str(tmp_path / "ascend.yaml")
    decode = load_both(profile, str(DEMO), ["decode.shift_row=stale"])[1].decode
    assert (decode.window_attention, decode.spawn_rule) == ("block_causal", "confident(blocks=1)")
    assert decode.shift_row == "stale", "what is given goes before"
    assert load_both(profile, "demo", [])[1].decode.window_attention == "full", "a run file says all of it"
    assert load_both(profile, str(DEMO), ["decode.strategy=vanilla"])[1].decode.window_attention == "full"


# Flags


@pytest.mark.parametrize("one", [*DECODING, AT_ONCE, LIMIT, OUTPUT], ids=lambda one: one.key)
def test_a_flag_names_a_setting_that_there_is(one: object) -> None:
    value = {
        "preset": "sdar",
        "dtype": "float32",
        "output.path": "o",
        "decode.block_size": "2",
        "decode.max_new_tokens": "64",
    }
    key = one.key  # type: ignore[attr-defined]
    load_profile_and_run("cpu", "demo", [f"{key}={value.get(key, '1')}"])


@pytest.mark.slow
def test_flags_are_settings_and_set_has_the_last_word(tmp_path: Path) -> None:
    write_run(tmp_path)
    arguments = ("run", "-p", "cpu", "run.yaml", "-k", "5", "--max-tokens", "64", "-o", "here.jsonl")
    result = lopa(tmp_path, *arguments, "--set", "decode.num_lookahead=2")
    assert result.returncode == 0, result.stderr
    decode = json.loads((tmp_path / "here.metrics.json").read_text())["run"]["decode"]
    assert (decode["num_lookahead"], decode["max_new_tokens"]) == (2, 64)
    wrong = lopa(tmp_path, "run", "-p", "cpu", "run.yaml", "-k", "many")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("lopa: --set decode.num_lookahead=many: decode.num_lookahead: set it to a whole")


def test_a_saved_run_means_what_was_given(tmp_path: Path) -> None:
    given = ["decode.num_lookahead=5", "decode.strategy.cache=dual", "decode.stop=['a: b']", "seed=3"]
    run = load_run(DEMO, ["decode.strategy=fast_dllm", *given])
    path = tmp_path / "new" / "my_run.yaml"
    save_run_file(path, run)
    assert load_run(path) == run
    with pytest.raises(ConfigError, match="it is there already"):
        save_run_file(path, run)
    with pytest.raises(ConfigError, match="new: a folder; choose another name"):
        save_run_file(path.parent, run)
    preset = load_run("demo", ["preset=llada2"])
    save_run_file(tmp_path / "preset.yaml", preset)
    assert load_run(tmp_path / "preset.yaml").decode == preset.decode, "whatever becomes of the preset"
    assert "preset" not in yaml.safe_load((tmp_path / "preset.yaml").read_text())


@pytest.mark.parametrize("name", ["a\nseed: 5\n", "a\x85b", "\u2028", "\udcff"])
def test_a_saved_run_is_the_same_whatever_its_file_is_called(tmp_path: Path, name: str) -> None:
    save_run_file(tmp_path / name, RunConfig(model="m"))
    assert load_run(tmp_path / name) == RunConfig(model="m")


def test_a_saved_run_is_written_where_a_link_leads_and_says_how_a_shell_starts_it(tmp_path: Path) -> None:
    link, file = tmp_path / "my run.yaml", tmp_path / "file.yaml"
    link.symlink_to(file)
    save_run_file(link, RunConfig(model="m"))
    assert link.is_symlink() and file.read_text().startswith(f"# Start it by `lopa run '{link}'`, ")
    with pytest.raises(ConfigError, match=rf"start it \(lopa run '{link}'\), or choose another name"):
        save_run_file(link, RunConfig(model="m"))


# lopa run


def test_a_file_of_requests_is_decoded_beside_the_runs_own(tmp_path: Path) -> None:
    write_run(tmp_path, "model: m\ninput: {path: none.jsonl, prompt_template: 'Q: {question}'}\noutput: {path: o}\n")
    chat = '{"messages": [{"role": "user", "content": "hello"}]}\n'
    (tmp_path / "mine.jsonl").write_text(chat + '{"prompt": "hi"}\n')
    result = lopa(tmp_path, "run", "run.yaml", "mine.jsonl", "-p", "cpu")
    assert result.returncode == 0, result.stderr
    assert "mine.jsonl: prompts are taken as they stand; the run's own are written as 'Q: {question}'" in result.stderr
    assert "<HELLO>" in (tmp_path / "outputs" / "run_mine.jsonl").read_text()


def test_a_template_that_lines_need_is_still_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, "model: m\ninput: {path: in.jsonl, prompt_template: '{text}'}\noutput: {path: o}\n")
    (tmp_path / "in.jsonl").write_text('{"question": "hello"}\n')
    result = lopa(tmp_path, "run", "run.yaml", "-p", "cpu")
    assert result.returncode == 2
    assert "in.jsonl: no line has {text}, which input.prompt_template names, and not all have prompt" in result.stderr


def test_a_file_that_is_not_there_is_told_as_the_argument_it_is(tmp_path: Path) -> None:
    result = lopa(tmp_path, "run", "demo", "none.jsonl", "-p", "cpu")
    fix = "give a JSONL file with one request a line, after MODEL or as input.path"
    assert (result.returncode, result.stderr) == (2, f"lopa: none.jsonl: no such input file; {fix}\n")


def test_where_the_data_of_benchmarks_come_from_is_said(tmp_path: Path) -> None:
    result = lopa(tmp_path, "run", "gsm8k", "-p", "cpu")
    assert result.returncode == 2 and "data/gsm8k_test.jsonl: no such input file" in result.stderr
    assert "docs/evaluation.md says how to write" in result.stderr


# Names that are nearly right


def test_a_trace_without_a_prompt_is_told_how_to_give_one() -> None:
    for command in ("trace", "trace demo"):
        error = CliRunner().invoke(app, [*command.split(), "--html", "x.html"]).exception
        assert str(error) == f"{command}: give the text to answer: lopa {command} 'What is 2 + 3?' --html out.html"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "demo", "hi", "--set", "decode.fill_rule=thresold"], "did you mean threshold? set it to one of"),
        (["run", "demo", "hi", "--set", "decode.spawn_rule=confidnt(blocks=1)"], "did you mean confident? set it to"),
        (["run", "demo", "hi", "--set", "decode.strategy=multiblock"], "did you mean multi_block? set it to d2f,"),
        (["run", "demo", "hi", "--dtype", "bfloat"], "did you mean bfloat16? set it to"),
        (["run", "demo", "hi", "--preset", "llda"], "did you mean llada?"),
        (["help", "runn"], "did you mean run?"),
        (["bench", "stepps", "demo"], "did you mean steps?"),
        (["estimate", "demo", "--hardware", "h20"], "did you mean h200?"),
    ],
)
def test_a_name_that_is_nearly_one_is_told_which(arguments: list[str], hint: str) -> None:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError) and hint in str(error)


def test_usage_has_no_braces() -> None:
    usage = CliRunner().invoke(app, ["parity", "--help"]).stdout.split("\n\n")[0]
    assert "parity [OPTIONS] FILE..." in " ".join(usage.split()) and "}" not in usage


def test_what_is_written_in_8_bits_is_no_setting_of_a_profile(tmp_path: Path) -> None:
    arguments = ["quantize", "demo", "--out", str(tmp_path / "out"), "--set", "quantization=fp8"]
    with pytest.raises(ConfigError, match=r"^--set quantization: .* --scheme"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_model_is_named_alike_in_every_command(tmp_path: Path) -> None:
    """A run's name stands for its model where a folder is wanted, too."""
    wrong = CliRunner().invoke(app, ["quantize", "demo", "--out", str(tmp_path / "out"), "--scheme", "nope"]).exception
    assert isinstance(wrong, ConfigError) and "scheme 'nope' is not known" in str(wrong)
    assert "40 linears" in CliRunner().invoke(app, ["doctor", "-p", "cpu", "--model", "demo"]).stdout


def test_a_quantized_folder_runs_without_a_setting_unless_the_profile_says_otherwise(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "quant_model_description.json").write_text("{}")
    assert load_both(None, str(folder), [])[0].quantization == "w8a8"
    assert load_both("cuda", str(folder), [])[0].quantization == "w8a8"
    assert load_both(None, str(folder), ["quantization=null"])[0].quantization is None
    assert load_both(None, str(folder), ["load_format=dummy"])[0].quantization is None


def test_a_model_without_anything_to_answer_is_told_so(tmp_path: Path) -> None:
    result = lopa(tmp_path, "run", str(model_folder(tmp_path)))
    assert result.returncode == 2
    assert "give what is to be answered after it: a text, or a JSONL file of requests" in result.stderr


def test_options_of_files_are_refused_with_one_prompt(tmp_path: Path) -> None:
    result = lopa(tmp_path, "run", "demo", "hello", "-o", "x.jsonl")
    assert result.returncode == 2
    assert result.stderr.startswith("lopa: --output: the answer to one prompt is printed")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "hello", "--overwrite"], "--overwrite: the answer to one prompt is printed"),
        (["demo", "hello", "--details"], "--details: the answer to one prompt is printed"),
        (["demo", "hello", "--allow-code-execution"], "--allow-code-execution: the answer to one prompt is printed"),
        (["demo", "hello", "--limit", "3"], "--limit: the answer to one prompt is printed"),
        (["demo", "hello", "--set", "output.step_map=true"], "--set output.step_map: the answer to one prompt is"),
        (["demo", "hello", "--set", "output={path: x}"], "--set output: the answer to one prompt is printed"),
        (["demo", "hello", "--set", "input.path=x.jsonl"], "--set input.path: the answer to one prompt is printed"),
        (["demo", "hello", "--set", "input.settings_field=a"], "--set input.settings_field: the answer to one prompt"),
        (["demo", "in.jsonl", "--overwrite", "--retry-errors"], "--retry-errors: --overwrite decodes all"),
        (["demo", "./"], "./: a folder; give a text to answer, or a JSONL file"),
        (["demo", "prompts.json"], "prompts.json: no such input file"),
        (["demo", "in.jsonl", "--set", "input.path=b.jsonl"], "in.jsonl and --set input.path"),
        (["", "hello"], "the model's name is empty"),
    ],
    ids=str,
)
def test_words_that_contradict_each_other_are_refused(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code != 0 and str(result.exception).startswith(sentence)


def test_a_pipe_is_a_file_of_requests(tmp_path: Path) -> None:
    """A shell's `<(...)` is one."""
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(app, ["run", "demo", str(tmp_path / "pipe"), "--overwrite", "--retry-errors"])
    assert str(result.exception).startswith("--retry-errors: --overwrite decodes all")


@pytest.mark.parametrize("text", ["0", "11", "²", "-1", "9" * 5000], ids=lambda text: text[:9])
def test_a_number_out_of_range_is_said_with_the_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'.{1,300}: give whole numbers from 1 to 10$"):
        WholeNumber(10)(text)
    assert WholeNumber(10)("10") == 10


def test_a_chat_takes_text_in_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode("latin-1")), "utf-8"))
    with pytest.raises(ConfigError, match=r"^chat: standard input is no text in UTF-8: convert it$"):
        next(_prompts())


@pytest.mark.slow
def test_a_run_that_cannot_load_its_model_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "model: none\ninput: {path: in.jsonl}\noutput: {path: o.jsonl}\n")
    done = started.lopa("run", "-p", "cpu", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "none: no such folder" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "run.yaml"]


def test_what_is_not_json_is_a_line_and_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "in.jsonl").write_text("hello\n")
    result = lopa(tmp_path, "run", "-p", "cpu", "run.yaml")
    assert result.stdout.splitlines()[0] == "0 requests finished, 1 error" and " - " not in result.stdout


@pytest.mark.slow
def test_many_requests_are_told_with_how_to_take_fewer(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 101)
    told = "101 requests to decode: --set input.limit=20 takes the first 20 alone"
    assert told in lopa(tmp_path, "run", "-p", "cpu", "run.yaml").stderr
    assert told not in lopa(tmp_path, "run", "-p", "cpu", "run.yaml", "--limit", "2", "--overwrite").stderr


# Help


def test_help_fits_a_narrow_terminal() -> None:
    """Line breaks of a docstring are none of its help's."""
    lines = (
        CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80"}).stdout.partition("Arguments")[0].splitlines()
    )
    assert "Answers go to --output, one line for each request" in " ".join(line.strip() for line in lines)
    text = next(lines[n:] for n, line in enumerate(lines) if "A line or row of a file" in line)
    paragraph = text[: next(n for n, line in enumerate(text) if not line.strip())]
    assert all(len(line.strip()) > 55 for line in paragraph[:-1]), paragraph


@pytest.mark.slow
def test_help_is_there_in_three_ways(tmp_path: Path) -> None:
    asked = [lopa(tmp_path, *arguments) for arguments in (("run", "-h"), ("run", "--help"), ("help", "run"))]
    for help in asked:
        assert help.returncode == 0 and "MODEL" in help.stdout and "--num-lookahead" in help.stdout
        assert "<bool>" not in help.stdout and "{MODEL}" not in help.stdout
    assert "Commands" in lopa(tmp_path, "help").stdout
    assert (
        lopa(tmp_path, "help", "nope").stderr == "lopa: help nope: there is no such command; `lopa help` lists them\n"
    )


@pytest.mark.parametrize("command", ["run", "serve", "chat", "trace", "evaluate", "estimate", "quantize", "demo"])
def test_the_profile_is_optional_and_the_same_everywhere(command: str) -> None:
    help = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "this machine's if not given" in help and "--profile" in help and "-p" in help


@pytest.mark.parametrize("words", [["bench", "steps"], ["bench", "load"], ["tune"]])
def test_commands_with_lists_take_it_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
    done = CliRunner().invoke(app, [*words, "nothing"])
    assert isinstance(done.exception, ConfigError) and "not one of the runs" in str(done.exception)


def test_an_estimate_without_a_device_is_of_one_that_is_described() -> None:
    done = CliRunner().invoke(app, ["estimate", "demo"])
    assert done.exit_code == 0, done.exception
    assert "One step on 1 x H200" in done.output and "since this machine has no accelerator" in done.output


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_a_script_explains_itself(script: str) -> None:
    if script in ("env.sh", "launch.sh", "usage.sh", "venv.sh"):  # sourced by the others
        return
    for option in ("--help", "-h"):
        done = subprocess.run([ROOT / "scripts" / script, option], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and f"scripts/{script}" in done.stdout and not done.stderr
        assert "set -euo" not in done.stdout and "source" not in done.stdout.split()[:1]


# An answer that is filled


def test_a_picture_has_a_sign_for_every_mask_and_keeps_the_end() -> None:
    filling = Filling(10)
    filling.take({"filled": [[11, 5, "b", -0.1]], "edited": [], "canvas_length": 4})
    assert filling.picture(100).plain == "░b░░"
    filling.take({"filled": [[10, 5, "a", -0.1]], "edited": [[11, 6, "c", -0.1]], "canvas_length": 4})
    picture = filling.picture(100)
    assert picture.plain == "ac░░" and [str(span.style) for span in picture.spans][:2] == ["bold green"] * 2
    assert filling.picture(2).plain == "░░"


def test_numbers_are_counted_in_english() -> None:
    assert [counted(number, "pass", "es") for number in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]
