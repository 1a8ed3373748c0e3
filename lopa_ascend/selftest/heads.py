"""The self-test's checks of torch's own operators whose corner cases the head relies on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from common.model import SamplingRows, noise_bits, sampling_fields
from lopa_ascend.selftest.checks import NUM_TOKENS, Bench
from lopa_ascend.selftest.grades import Grade, Verdict, compare

_NUM_COLUMNS = 4000


def first_of_ties(bench: Bench) -> Verdict:
    """Check that a maximum's index is that of the first among equals; else tokens that tie depend on the device."""
    logits = (bench.normal(NUM_TOKENS, _NUM_COLUMNS) * 2).round().float()
    found = logits.to(bench.device).max(dim=-1).indices
    bench.finish()
    num_other = int((found.cpu() != logits.argmax(dim=-1)).sum())
    if num_other == 0:
        return Verdict(Grade.SAME, "equal")
    return Verdict(Grade.ROUNDS_DIFFERENTLY, f"{num_other} of {NUM_TOKENS} maxima are not the first of their ties")


def noise(bench: Bench) -> Verdict:
    """Check that int32 products wrap and xor broadcasts; else samples follow another distribution."""
    place = np.arange(NUM_TOKENS)
    fields = sampling_fields(np.ones((3, NUM_TOKENS), dtype=np.float32), place, place, place, NUM_TOKENS)
    rows = [SamplingRows.of(torch.from_numpy(fields).to(device)) for device in (bench.device, "cpu")]
    found, wanted = (noise_bits(one, 0, _NUM_COLUMNS) for one in rows)
    bench.finish()
    return compare([found.cpu()], [wanted])


# What only sampled steps call is reported, and stops nothing.
SAMPLING = "noise at temperature > 0"
HEAD_CHECKS: dict[str, Callable[[Bench], Verdict]] = {"max, first of ties": first_of_ties, SAMPLING: noise}
