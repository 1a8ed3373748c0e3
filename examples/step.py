"""Drive the main loop by hand: requests come and go between steps: python examples/step.py

A step is one forward pass for all open requests, and tells which of their tokens became final in it.
"""

from common.config import load_profile, load_run
from common.decoding import GenerationRequest
from common.generate import build_generator

QUESTION = "Tom has {} apples and buys 5 more. How many apples does he have now?\n"


def main() -> None:
    run = load_run("demo", ["decode.num_lookahead=3", "max_num_requests=2"])
    with build_generator(load_profile("cpu"), run) as generator, generator.decoding() as core:
        for name, number in (("first", 3), ("second", 12), ("third", 40)):
            core.add_request(GenerationRequest(name, generator.requests.prompts.of(QUESTION.format(number))))
        num_steps = 0
        while core.has_work:
            num_steps += 1
            for output in core.step():
                print(f"{num_steps:3} {output.id:7} {generator.tokenizer.decode(list(output.token_ids))!r}")
                if output.result is not None:
                    print(f"    {output.id} has ended")
            if num_steps == 6:
                core.abort("second")  # ends with what it has by then


if __name__ == "__main__":
    main()
