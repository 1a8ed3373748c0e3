"""Settings by which right answers of a benchmark would be marked wrong, told before the first is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from common.batch.inputs import InputLine
from common.config import DecodeConfig, InputConfig
from common.scoring import task_of

if TYPE_CHECKING:
    from common.checkpoint import Tokenizer


def cautions(
    lines: Sequence[InputLine], source: InputConfig, decode: DecodeConfig, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield a sentence for each such setting. What the settings are held against are the right answers that rows
    hold."""
    task = task_of(source)
    if task is None:
        return
    if not task.shots and task.benchmark.num_fewshot and not task.benchmark.runs_code:
        yield (
            f"input.num_fewshot is 0: no solved row shows the form in which {task.name} looks for results, so that "
            "right answers in another form are marked wrong"
        )
    answers = [answer for line in lines if line.error is None and (answer := task.reference(line.fields)) is not None]
    for stop in decode.stop:
        if num_cut := sum(stop in answer for answer in answers):
            yield (
                f"decode.stop has {stop!r}, which stands in {num_cut} of {len(answers)} right answers that the input "
                "holds: answers like them are cut there and marked wrong; remove it"
            )
    most = decode.max_new_tokens
    if num_long := sum(len(tokenizer.encode(answer)) > most for answer in answers if len(answer) > most):
        yield (
            f"decode.max_new_tokens is {most}, and {num_long} of {len(answers)} right answers that the input holds are "
            "longer: answers like them are cut and marked wrong; raise it"
        )
