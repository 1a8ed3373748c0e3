"""A whole third platform, whose model predicts token 7 everywhere and is sure of it: python examples/third_platform.py

In a package it is a module `platforms`, named in `_PROVIDERS` of common/platforms.py. Its names also go into `engine`
and `device` of common/config/profile.py, and the package into pyproject.toml (wheel, layers).
"""

import numpy as np

from common.config import DecodeConfig
from common.decoding import Capacity, GenerationRequest, Predictions, Scheduler, decode_requests
from common.platforms import Platform
from common.processes import Mesh


class SevenEngine:
    """common.decoding.Engine"""

    def __init__(self, num_requests):
        self.mesh = Mesh()
        self.capacity = Capacity(num_requests, max_model_len=4096)

    def forward(self, plan):
        sure_T = np.ones(plan.num_tokens, dtype=np.float32)
        return Predictions.of(np.full_like(plan.token_T, 7), sure_T, sure_T)

    def commit(self, plan, winner_row_of_request):
        """Where KV of plan.commits becomes final; this engine has none."""

    def measure_passes(self, decode):
        return None  # so a pace is refused

    def describe(self):
        return {"engine": "lopa_seven"}

    def close(self):
        """Nothing to leave."""


class Seven(Platform):
    engine = "lopa_seven"
    device = "seven"

    def build_engine(self, profile, run):
        return SevenEngine(run.max_num_requests)


PLATFORMS = (Seven(),)

if __name__ == "__main__":
    scheduler = Scheduler(DecodeConfig(max_new_tokens=64), mask_token_id=1, eos_token_id=None)
    (done,) = decode_requests(iter([GenerationRequest("a", (2, 3))]), scheduler, SevenEngine(1))
    print(f"{len(done.token_ids)} tokens in {done.num_forwards} passes, all of them {set(done.token_ids)}")
