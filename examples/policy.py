"""Decode with a rule of your own: fewer lookaheads after a step that filled much: python examples/policy.py

A package names its rules in pyproject.toml (docs/policies.md); `register` makes the same entry for this file.
"""

import sys
import tempfile
from pathlib import Path

from common.config import load_profile, load_run
from common.decoding import GenerationRequest
from common.generate import build_generator
from common.policies import Stepped

PROMPT = "Tom has 12 apples and buys 5 more. How many apples does he have now?\n"


def count(stepped: Stepped, *, plenty: float = 4, share: float = 0.5) -> int:
    """Return how many lookaheads the next step tries."""
    most = stepped.settings.num_lookahead
    return most if stepped.num_filled < plenty else round(share * most)


def register(folder: Path) -> None:
    info = folder / "policy_example-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: policy-example\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lopa.lookahead_rules]\npatient = policy:count\n")
    sys.path += [str(folder), str(Path(__file__).parent)]


def main() -> None:
    for rule in ("all", "patient(plenty=6)"):
        run = load_run("demo", [f"decode.lookahead_rule={rule}"])
        with build_generator(load_profile("cpu"), run) as generator:
            (done,) = generator.generate([GenerationRequest("0", generator.requests.prompts.of(PROMPT))])
            print(f"{rule}: {len(done.token_ids)} tokens, {done.num_forwards} passes, {done.num_rows} branches")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        register(Path(folder))
        main()
