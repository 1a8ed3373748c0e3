"""Questions from a Parquet file and answers into one: what rows mean, what resumes, what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli import lopa, write_run

from common import parquet as parquet_module
from common.batch import kept_as_lines, read_lines, write_table
from common.config import InputConfig, OutputConfig, load_run
from common.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[parquet]'")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from pyarrow.parquet import write_table as write_parquet

    write_parquet(pyarrow.Table.from_pylist(rows), path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import read_table

    found: list[dict[str, Any]] = read_table(path).to_pylist()
    return found


def run(folder: Path, *arguments: str) -> Any:
    if not (folder / "run.yaml").exists():
        write_run(folder)
    return lopa(folder, "run", "run.yaml", "questions.parquet", "-p", "cpu", "-o", "answers.parquet", *arguments)


@pytest.mark.slow
def test_answers_are_those_of_json_lines(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": None}, {"id": "c", "prompt": "three"}]
    write(tmp_path / "questions.parquet", rows)
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "results in answers.parquet" in done.stdout
    lines = lopa(tmp_path, "run", "run.yaml", "same.jsonl", "-p", "cpu", "-o", "lines.jsonl")
    assert lines.returncode == 0, lines.stderr
    wanted = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    found = {row["id"]: row for row in rows_of(tmp_path / "answers.parquet")}
    for record in wanted:
        row = found[record["id"]]
        assert (row["text"], row["error"]) == (record.get("text"), record.get("error"))
    assert {"a", "b", "c"} == set(found) and "give exactly one of prompt" in found["b"]["error"]


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "questions.parquet", [{"id": number, "prompt": f"p{number}"} for number in range(4)])
    assert run(tmp_path, "--limit", "2").returncode == 0
    kept = (tmp_path / "answers.jsonl").read_bytes()
    assert [row["id"] for row in rows_of(tmp_path / "answers.parquet")] == [0, 1]
    more = run(tmp_path)
    assert more.returncode == 0 and "resuming, 2 of 4 requests are done" in more.stderr
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(kept)
    assert [row["id"] for row in rows_of(tmp_path / "answers.parquet")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_other_questions_are_another_run(tmp_path: Path) -> None:
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "one"}])
    assert run(tmp_path).returncode == 0
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "another"}])
    refused = run(tmp_path)
    assert refused.returncode == 2 and "answers.jsonl holds results of another run" in refused.stderr
    assert run(tmp_path, "--overwrite").returncode == 0


@pytest.mark.slow
def test_a_table_without_its_lines_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "one"}])
    assert run(tmp_path).returncode == 0
    (tmp_path / "answers.jsonl").unlink()
    before = (tmp_path / "answers.parquet").read_bytes()
    refused = run(tmp_path)
    assert refused.returncode == 2 and "from which a start resumes, does not" in refused.stderr
    assert (tmp_path / "answers.parquet").read_bytes() == before
    assert run(tmp_path, "--overwrite").returncode == 0


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_a_table_of_something_else_is_kept(tmp_path: Path, flags: list[str]) -> None:
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "one"}])
    write(tmp_path / "answers.parquet", [{"id": 1, "answer": "mine"}])
    before = (tmp_path / "answers.parquet").read_bytes()
    refused = run(tmp_path, *flags)
    assert refused.returncode == 2 and "answers.parquet exists and is not the output of a batch run" in refused.stderr
    assert (tmp_path / "answers.parquet").read_bytes() == before


def test_the_questions_are_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "one"}])
    write_run(tmp_path)
    refused = lopa(tmp_path, "run", "run.yaml", "questions.parquet", "-p", "cpu", "-o", "questions.parquet")
    assert refused.returncode == 2 and "questions.parquet is the input too" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"PAR1", b"PAR1 and something else", b"PAR1" + b"\0" * 64 + b"PAR1"])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "questions.parquet").write_bytes(content)
    refused = run(tmp_path)
    assert refused.returncode == 2 and "questions.parquet: no whole Parquet file" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table, content = pyarrow.Table.from_arrays(columns, names=["question", "question"]), io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(table, content)
    (tmp_path / "twice.parquet").write_bytes(content.getvalue())
    with pytest.raises(ConfigError, match="the column 'question' stands there twice: leave one of them out"):
        read_lines(InputConfig(path=str(tmp_path / "twice.parquet")))


def test_a_file_that_is_not_there_is_one_all_the_same(tmp_path: Path) -> None:
    refused = run(tmp_path)
    assert refused.returncode == 2 and "questions.parquet: no such input file" in refused.stderr


def test_without_pyarrow_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "questions.parquet", [{"id": 1, "prompt": "one"}])
    monkeypatch.setattr(parquet_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"questions.parquet: Parquet needs pyarrow: pip install -e '.\[parquet\]'"):
        read_lines(InputConfig(path=str(tmp_path / "questions.parquet")))
    asked = load_run("demo").model_copy(update={"output": OutputConfig(path=str(tmp_path / "answers.parquet"))})
    with pytest.raises(ConfigError, match=r"answers.parquet: Parquet needs pyarrow"):
        kept_as_lines(asked, overwrite=False)


def test_rows_mean_what_lines_do(tmp_path: Path) -> None:
    from datetime import date

    path = tmp_path / "q.parquet"
    user, tool = {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "name": "x"}
    write(
        path,
        [
            {
                "id": 1,
                "messages": [user, tool],
                "when": date(2026, 1, 2),
                "picture": b"\xff\xd8",
                "old": "über".encode(),
            },
            {"id": 2, "messages": [user], "score": float("nan")},
        ],
    )
    first, second = read_lines(InputConfig(path=str(path)))
    assert first.fields["messages"] == [user, {"role": "assistant", "name": "x"}], "what Arrow adds is left out"
    assert (first.fields["when"], first.fields["picture"], first.fields["old"]) == ("2026-01-02", None, "über")
    assert second.fields == {"id": 2, "messages": [user]}


def test_a_column_that_is_no_column_of_one_kind_holds_json(tmp_path: Path) -> None:
    records = [
        {"id": 1, "body": {"a": 1}, "ids": [1, 2], "n": 2**80, "none": None},
        {"id": "b", "body": {}, "ids": [], "n": 1, "extra": "x"},
    ]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_table(tmp_path / "o.jsonl", tmp_path / "o.parquet")
    first, second = rows_of(tmp_path / "o.parquet")
    assert (first["id"], second["id"]) == ("1", '"b"')
    assert [json.loads(first["body"]), json.loads(second["body"])] == [{"a": 1}, {}]
    assert (first["ids"], second["ids"], first["n"], second["extra"], first["none"]) == (
        [1, 2],
        [],
        str(2**80),
        "x",
        None,
    )


def test_a_text_that_is_no_unicode_is_kept_as_json(tmp_path: Path) -> None:
    (tmp_path / "o.jsonl").write_text('{"id": "\\ud800", "text": "a"}\n{"id": "b", "text": "\\udfff"}\n')
    write_table(tmp_path / "o.jsonl", tmp_path / "o.parquet")
    rows = rows_of(tmp_path / "o.parquet")
    assert [json.loads(row["id"]) for row in rows] == ["\ud800", "b"]
    assert [json.loads(row["text"]) for row in rows] == ["a", "\udfff"]


@pytest.mark.parametrize("kind", ["timestamp", "date", "duration", "zone", "bytes"])
def test_a_value_that_python_does_not_have_is_a_sentence(tmp_path: Path, kind: str) -> None:
    from pyarrow.parquet import write_table as write_parquet

    made = {
        "timestamp": lambda: pyarrow.array([2**50], pyarrow.timestamp("ms")),
        "date": lambda: pyarrow.array([2**31 - 1], pyarrow.int32()).view(pyarrow.date32()),
        "duration": lambda: pyarrow.array([2**60], pyarrow.duration("s")),
        "zone": lambda: pyarrow.array([0], pyarrow.timestamp("ms", tz="Mars/Phobos")),
        "bytes": lambda: pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string()),
    }[kind]()
    path = tmp_path / "q.parquet"
    write_parquet(pyarrow.table({"prompt": ["a"], "other": made}), path)
    with pytest.raises(ConfigError, match=r"q\.parquet: a value, such as a date or a text, cannot be read"):
        read_lines(InputConfig(path=str(path)))


def test_a_parquet_file_may_come_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "q.parquet", [{"id": 1, "prompt": "one"}])
    from common.batch import source

    source._read_whole.cache_clear()
    stdin = io.TextIOWrapper(io.BytesIO((tmp_path / "q.parquet").read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    (line,) = read_lines(InputConfig(path="-"))
    source._read_whole.cache_clear()
    assert line.fields == {"id": 1, "prompt": "one"}
