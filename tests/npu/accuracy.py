"""A hundred problems in one lane, in a process of its own; the last line printed is JSON: every answer's token ids, and
percent_right.

    python tests/npu/accuracy.py LANE NUM_PROBLEMS NUM_LOOKAHEAD

LANE: cuda (engine lopa_cuda in bfloat16), bf16 or w8a8 (engine lopa_ascend on a simulated device). Decoded as
configs/runs/demo_block_causal.yaml says, but for num_lookahead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
PROFILES = {
    "cuda": {"engine": "lopa_cuda", "device": "cpu"},
    "bf16": {"engine": "lopa_ascend", "device": "npu"},
    "w8a8": {"engine": "lopa_ascend", "device": "npu", "quantization": "w8a8"},
}
AT_ONCE = 100  # requests; the more, the smaller the share of the host and of the simulation


def decode(lane: str, num_problems: int, num_lookahead: int) -> dict[str, Any]:
    from common.config import DeviceProfile
    from common.config.files import load_run
    from common.decoding import Completion, GenerationRequest
    from common.generate import build_generator
    from common.scoring import score

    overrides = [f"model={DEMO}", f"max_num_requests={AT_ONCE}", f"decode.num_lookahead={num_lookahead}"]
    run = load_run(ROOT / "configs" / "runs" / "demo_block_causal.yaml", overrides)
    profile = DeviceProfile.model_validate({"name": lane, "max_model_len": 320, **PROFILES[lane]})
    lines = (DEMO / "heldout_math.jsonl").read_text().splitlines()[:num_problems]
    problem_of = {str(number): json.loads(line) for number, line in enumerate(lines)}
    with build_generator(profile, run) as generator:
        prompt_of = {id: generator.tokenizer.encode(problem["question"] + "\n") for id, problem in problem_of.items()}
        results = generator.generate(GenerationRequest(id, tuple(prompt)) for id, prompt in prompt_of.items())
        answers = {result.id: list(result.token_ids) for result in results if isinstance(result, Completion)}
        texts = {id: generator.tokenizer.decode(answer) for id, answer in answers.items()}
    num_right = sum(score(problem_of[id], text) for id, text in texts.items())
    return {"answers": answers, "percent_right": 100 * num_right / num_problems}


def main() -> None:
    torch.set_num_threads(1)
    lane, *numbers = sys.argv[1:]
    if PROFILES[lane]["device"] == "npu":
        from sim import runtime

        runtime.load()
        from sim.device import SimulatedNpu

        SimulatedNpu().__enter__()
    print(json.dumps(decode(lane, *map(int, numbers))))


if __name__ == "__main__":
    main()
