"""Let foreign load generators ask `lopa serve`, and keep what they say of it.

python -m scripts.lab.load_generators GUIDELLM AIPERF    programs; writes docs/results/load_generators_cpu.json

Each sends chats of 48 tokens of its own to the demo model on a CPU and wants 32 tokens back, without an end token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lab.result import ROOT, busy_cpu, write_table
from tests.engine.serving.served import Served

RESULT = ROOT / "docs" / "results" / "load_generators_cpu.json"
MODEL = ROOT / "models" / "demo"
AT_ONCE = (1, 4)
COUNT, PROMPT, ANSWER = 24, 48, 32
_COLUMNS = (
    ("tool", ""), ("requests at once", "d"), ("answers", "d"), ("errors", "d"), ("tokens/s", ".1f"),
    ("first token ms", ",.0f"), ("ms a token after it", ".1f"), ("answer ms", ",.0f"),
)  # fmt: skip


def guidellm(program: str, url: str, at_once: int, folder: Path) -> list[Any]:
    """Return the numbers of guidellm 0.8."""
    command = [
        program, "run", "--backend", f"kind=openai_http,target={url},request_format=/v1/chat/completions",
        "--profile", f"kind=concurrent,streams={at_once}", "--constraint", f"kind=max_requests,count={COUNT}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
    ]  # fmt: skip
    _run(command, folder, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    found, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    median = [found[name]["successful"]["median"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")]
    seconds = found["request_latency"]["successful"]["median"]
    speed = found["output_token_count"]["successful"]["total_sum"] / benchmark["duration"]
    return [totals["successful"], totals["errored"] + totals["incomplete"], speed, *median, 1000 * seconds]


def aiperf(program: str, url: str, at_once: int, folder: Path) -> list[Any]:
    """Return the numbers of aiperf 0.13."""
    command = [
        program, "profile", "--model", "demo", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(MODEL), "--concurrency", str(at_once), "--request-count", str(COUNT),
        "--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER),
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none",
        "--output-artifact-dir", str(folder),
    ]  # fmt: skip
    _run(command, folder)
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    errors = round(found.get("error_request_count", {"avg": 0})["avg"])
    median = [found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency", "request_latency")]
    return [round(found["request_count"]["avg"]), errors, found["output_token_throughput"]["avg"], *median]


def _run(command: Sequence[str], folder: Path, **environment: str) -> None:
    print(" ".join(command), flush=True)
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"{command[0]} has ended with {done.returncode}: {(folder / 'log').read_text()[-2000:]}")


def main(programs: Sequence[str]) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as base, Served(Path(base) / "served", "-k", "2", "-n", "4") as server:
        for at_once in AT_ONCE:
            for ask, program in zip((guidellm, aiperf), programs, strict=True):
                with tempfile.TemporaryDirectory() as folder:
                    rows.append([ask.__name__, at_once, *ask(program, server.url, at_once, Path(folder))])
        refused = [line for line in server.get("/metrics")[1].splitlines() if "lopa_http_requests_total{" in line]
        print("\n".join(line for line in refused if 'status="2' not in line and "/ready" not in line))
    conditions = (
        f"k = 2, {COUNT} streamed chats each of {PROMPT} tokens, {ANSWER} tokens back. Times are medians; what others "
        "did on the machine makes the differences between rows"
    )
    write_table(RESULT, busy_cpu(), "python -m scripts.lab.load_generators", conditions, _COLUMNS, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
