"""Decode a list of prompts together, each with wishes of its own: python examples/batch.py"""

from common.config import load_profile, load_run
from common.generate import build_generator
from common.requests import Wishes

QUESTION = "Tom has {} apples and buys 5 more. How many apples does he have now?\n"


def main() -> None:
    profile = load_profile("cpu")
    run = load_run("demo", ["decode.num_lookahead=3", "max_num_requests=4"])
    with build_generator(profile, run) as generator:
        prompts = [QUESTION.format(number) for number in (3, 12, 40)]
        for prompt, answer in zip(prompts, generator.complete(*prompts), strict=True):
            print(f"{prompt.strip()}\n{answer}\n")

        # The same requests as objects: each completion comes as it ends, with its numbers.
        make, wishes = generator.requests, Wishes.read({"max_tokens": 96, "num_lookahead": 1})
        requests = [make.request(str(place), make.prompts.of(prompt), wishes) for place, prompt in enumerate(prompts)]
        for done in generator.generate(requests):
            tokens = len(done.token_ids)
            print(f"prompt {done.id}: {tokens} tokens in {done.num_forwards} passes")


if __name__ == "__main__":
    main()
