"""A strategy that a model was not trained for is refused by every command, in the same sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.commands.main import app
from common.errors import ConfigError

ROOT = Path(__file__).parents[3]
FROM_ZERO = "decode.strategy d2f: the model's blocks (sdar) are counted from position 0: set it to block_diffusion"
FROM_PROMPT = "decode.strategy block_diffusion: the model's blocks (dream) are counted from the prompt's end: set it to"


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    ("command", "few"),
    [
        (["bench", "steps", "-p", "cpu"], ["--cached", "8", "--shapes", "1x8", "--no-mixes"]),
        (["estimate", "-p", "h200_tp1_bp1"], []),
        (["run", "-p", "cpu"], []),
    ],
)
def test_a_strategy_of_other_blocks_is_refused(command: list[str], few: list[str], tmp_path: Path) -> None:
    questions, run = tmp_path / "in.jsonl", tmp_path / "run.yaml"
    questions.write_text('{"prompt": "1"}\n')
    run.write_text(
        f"model: {ROOT / 'models' / 'demo_block'}\ninput: {{path: {questions}}}\noutput: {{path: {tmp_path / 'out'}}}\n"
        "decode: {strategy: d2f, block_size: 4, max_new_tokens: 16}\n"
    )
    assert refusal(*command, str(run), *few).startswith(FROM_ZERO)


def test_an_estimate_of_dream_is_none_of_block_diffusion() -> None:
    own = ["--set", f"model={ROOT / 'configs' / 'models' / 'dream_7b'}", "--set", "decode.strategy=block_diffusion"]
    assert refusal("estimate", "-p", "h200_tp1_bp1", "dream_7b_dummy", *own).startswith(FROM_PROMPT)
