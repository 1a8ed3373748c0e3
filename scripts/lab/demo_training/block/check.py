"""A short look at what was trained: held-out problems, accuracy and tokens a pass. Results come from the evaluation."""

from __future__ import annotations

from demo_problems import PROMPT_END, held_out_code, held_out_math
from tokenizers import Tokenizer

from common.scoring import score, standard_error
from demo_training.log import Log
from demo_training.tokenizer import special_ids

from .decode import decode_blocks
from .model import BlockDiffusion


def block_check(model: BlockDiffusion, tokenizer: Tokenizer, log: Log) -> None:
    """Prints a line for math and one for code, then two answers."""
    recipe = model.recipe
    sets = {"math": held_out_math(recipe.checked_problems), "code": held_out_code(recipe.checked_problems // 2)}
    for threshold in recipe.checked_thresholds:
        for name, problems in sets.items():
            prompts = [tokenizer.encode(p["question"] + PROMPT_END).ids for p in problems]
            decoded = decode_blocks(model, prompts, threshold, *special_ids(tokenizer))
            texts = tokenizer.decode_batch(decoded.answers)
            right = sum(score(problem, text) for problem, text in zip(problems, texts, strict=True))
            tokens, passes = sum(map(len, decoded.answers)), sum(decoded.num_passes)
            log(
                f"check, not a result: threshold {threshold}: {name} {right}/{len(problems)} right (se "
                f"{standard_error(right, len(problems)):.3f}), {tokens / passes:.2f} tokens a pass without commits, "
                f"{sum(decoded.is_ended)} ended"
            )
            print(f"--- {problems[0]['question']}\n{texts[0]!r}", flush=True)
