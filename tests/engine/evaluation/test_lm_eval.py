"""lm-eval itself drives the demo model on local rows, and asks and marks as `input.benchmark` does."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from started import lopa

from common.config import InputConfig
from common.scoring.benchmarks.task import BENCHMARKS, task_of
from common.scoring.results.latex import boxed, normalized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'lopa[eval]'"),
]
ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"
# HumanEval/23 of openai/human-eval (MIT).
HUMANEVAL = {
    "task_id": "HumanEval/23",
    "prompt": '\n\ndef strlen(string: str) -> int:\n    """ Return length of given string\n    >>> strlen(\'abc\')\n'
    '    3\n    """\n',
    "entry_point": "strlen",
    "canonical_solution": "    return len(string)\n",
    "test": "def check(candidate):\n    assert candidate('') == 0\n    assert candidate('asdasnakj') == 9\n",
}
# A row of google-research/mbpp (CC BY 4.0).
MBPP = {
    "task_id": 17,
    "text": "Write a function to find the perimeter of a square.",
    "code": "def square_perimeter(a):\r\n  perimeter=4*a\r\n  return perimeter",
    "test_setup_code": "",
    "test_list": [f"assert square_perimeter({side})=={4 * side}" for side in (10, 5, 4)],
    "challenge_test_list": [],
}
RUN = "model: {model}\ndecode: {{num_lookahead: 3, block_size: 16, max_new_tokens: 48}}\nmax_num_requests: 4\n"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lm_eval(
    folder: Path, tasks: str, *options: str, args: str = "run=run.yaml,profile=cpu,max_num_requests=2"
) -> subprocess.CompletedProcess[str]:
    command = ["lm-eval", "run", "--model", "lopa", "--tasks", tasks, "--model_args", args]
    command += options if "--include_path" in options else ["--include_path", str(ROOT / "configs/lm_eval"), *options]
    (folder / "run.yaml").write_text(RUN.format(model=ROOT / "models/demo"))
    return lopa(*command, cwd=folder, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}, timeout=1200)


def test_local_subsets_end_to_end(tmp_path: Path) -> None:
    gsm8k = [json.loads(line) for line in SAMPLE.read_text().splitlines()][:3]
    write(tmp_path / "data" / "gsm8k_test.jsonl", gsm8k)
    write(tmp_path / "data" / "gsm8k_train.jsonl", gsm8k)
    write(tmp_path / "data" / "humaneval.jsonl", [HUMANEVAL])
    write(tmp_path / "data" / "mbpp.jsonl", [MBPP, {**MBPP, "task_id": 600}])
    options = ("--num_fewshot", "0", "--output_path", "out", "--log_samples", "--confirm_run_unsafe_code")
    ended = lm_eval(tmp_path, "gsm8k_local,humaneval_local,mbpp_local", *options)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert {name: count["effective"] for name, count in found["n-samples"].items()} == {
        "gsm8k_local": 3,
        "humaneval_local": 1,
        "mbpp_local": 1,
    }
    for name in ("gsm8k", "humaneval", "mbpp"):
        samples = [json.loads(line) for path in results.parent.glob(f"samples_{name}_local_*") for line in path.open()]
        task = task_of(InputConfig(path="x", benchmark=name, num_fewshot=0))
        assert samples and task is not None
        for sample in samples:
            assert task.prompt(sample["doc"]).text == sample["arguments"]["gen_args_0"]["arg_0"]
            (text,) = sample["resps"][0]
            rule = sample["filter"] if name == "gsm8k" else "pass@1"
            marks = BENCHMARKS[name].mark(sample["doc"], text)  # type: ignore[index]
            assert marks[rule] == bool(sample["exact_match" if name == "gsm8k" else "pass_at_1"])


def test_multiple_choice_is_decided_by_the_likelihood_of_each_choice(tmp_path: Path) -> None:
    question = "Tom has {} apples and buys 5 more. How many apples does he have now?\n"
    rows = [
        {
            "question": question.format(number),
            "choices": [f"Step 1: at first there are {n} apples" for n in (90, number)],
        }
        for number in (12, 23, 31)
    ]
    write(tmp_path / "data" / "choices.jsonl", rows)
    task = {
        "task": "choices_local", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": "data/choices.jsonl"}}, "doc_to_text": "{{question}}",
        "doc_to_choice": "choices", "doc_to_target": 1, "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choices_local.yaml").write_text(json.dumps(task))
    ended = lm_eval(
        tmp_path, "choices_local", "--include_path", str(tmp_path / "tasks"), "--output_path", "out", "--log_samples",
        args="run=run.yaml,profile=cpu,max_num_requests=8,num_maskings=24",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["choices_local"]
    assert found["acc,none"] == 1.0, "the demo model begins so"
    samples = [json.loads(line) for path in results.parent.glob("samples_*") for line in path.open()]
    assert len(samples) == 3 and all(float(pair[0][0]) < 0 for sample in samples for pair in sample["resps"])


def test_programs_are_run_only_where_lm_eval_is_told_so(tmp_path: Path) -> None:
    write(tmp_path / "data" / "humaneval.jsonl", [HUMANEVAL])
    ended = lm_eval(tmp_path, "humaneval_local")
    assert ended.returncode == 2
    assert "lopa: lm-eval: Attempted to run task: humaneval_local which is marked as unsafe" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_missing_data_is_one_sentence(tmp_path: Path) -> None:
    ended = lm_eval(tmp_path, "gsm8k_local")
    assert ended.returncode == 2
    assert "data/gsm8k_test.jsonl'; put it there, or correct data_files in the task's YAML file" in ended.stderr


def test_the_rules_of_gsm8k_are_lm_evals() -> None:
    import yaml
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    task = yaml.safe_load((ROOT / "configs/lm_eval/gsm8k_local.yaml").read_text())
    options = {key: value for key, value in task["metric_list"][0].items() if key.startswith(("ignore", "regexes"))}
    texts = [
        "#### 3", "#### 3.", "#### $3", "####3", "#### 1,200\n#### 4", "so 1,200.", "$3.", "it is -3", "3.0", "..",
        "#### .", "#### -3", "A 3 B", "#### 3 apples", "Question: 3", "", "three", "#### 3\n\nor 5", "3,", "#### 12,00",
    ]  # fmt: skip
    for answer in ("#### 3", "#### 1,200", "#### -3"):
        row = {"question": "?", "answer": f"so\n{answer}"}
        for name, chosen in (("strict-match", 0), ("flexible-extract", 1)):
            step = {key: value for key, value in task["filter_list"][chosen]["filter"][0].items() if key != "function"}
            found = [texts[0] for texts in RegexFilter(**step).apply([[text] for text in texts], [{}] * len(texts))]
            for text, extracted in zip(texts, found, strict=True):
                expected = exact_match_hf_evaluate([extracted], [row["answer"]], **options)["exact_match"]
                assert BENCHMARKS["gsm8k"].mark(row, text)[name] == bool(expected), (text, answer, name)


def test_results_of_math_are_normalized_as_lm_eval_does() -> None:
    pytest.importorskip("math_verify")
    utils = pytest.importorskip("lm_eval.tasks.minerva_math.utils")
    texts = [
        r"x = \frac12", "$18$ dollars", r"90^\circ", "1,000", r"\text{east}", r"2\sqrt3", r"\sqrt[3]8", "(2, 5]",
        r"30\ \text{m}", r"\left(3,\frac{\pi}{2}\right)", "0,1", "an even integer", r"5\mbox{ cm}^2", r"\dots", "",
    ]  # fmt: skip
    assert [normalized(text) for text in texts] == [utils.normalize_final_answer(text) for text in texts]
    for text in (r"\boxed{1} \boxed{\frac{1}{2}}", r"so $\boxed 7$.", r"\fbox{x}", "none", r"\boxed{open"):
        whole = utils.last_boxed_only_string(text)
        expected = None if whole is None else whole[6:-1] if "fbox" in whole else utils.remove_boxed(whole)
        assert boxed(text) == expected


def test_shots_of_math_are_lm_evals() -> None:
    pytest.importorskip("math_verify")
    utils = pytest.importorskip("lm_eval.tasks.minerva_math.utils")
    task = task_of(InputConfig(path="x", benchmark="math"))
    assert task is not None
    rows = utils.list_fewshot_samples()
    assert task.shots == "".join(f"{utils.doc_to_text(row)} {row['solution']}\n\n" for row in rows)
