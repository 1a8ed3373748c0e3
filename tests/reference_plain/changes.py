"""What a pass changes about its logits before they become predictions: classifier-free guidance and the penalty on a
repeated token.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Int, RowField, StepPlan
from reference_plain.rules import NO_TOKEN
from reference_plain.state import RequestStep


def with_changes(plan: StepPlan, steps: list[RequestStep]) -> StepPlan:
    """The same plan with `changes_2T` and, under guidance, a second row behind each, whose prompt is masked."""
    sampling, num_tokens = plan.sampling, plan.num_tokens
    lowered_T = np.full(num_tokens, NO_TOKEN, dtype=np.int64)
    if sampling.penalty_lambda:
        lowered_T[1:] = plan.token_T[:-1]
        lowered_T[_first_of_blocks(plan, steps)] = NO_TOKEN
    own_T = np.arange(num_tokens)
    if not sampling.cfg_scale:
        return plan._replace(changes_2T=np.stack((own_T, lowered_T)))
    prompt_R = np.array([step.decoding.prompt_length for step in steps]).repeat([len(step.widths) for step in steps])
    is_prompt_T = plan.position_T < prompt_R.repeat(plan.num_entries_R)
    masked_3T = plan.entries_3T.copy()
    masked_3T[0, is_prompt_T] = sampling.mask_token_id
    fields_8R = plan.row_fields_8R.copy()
    fields_8R[RowField.FIRST] += num_tokens
    partner_T = np.concatenate((own_T + num_tokens, own_T + num_tokens))
    return plan._replace(
        entries_3T=np.concatenate((plan.entries_3T, masked_3T), axis=1),
        is_read_T=np.concatenate((plan.is_read_T, np.zeros(num_tokens, dtype=np.bool_))),
        row_fields_8R=np.concatenate((plan.row_fields_8R, fields_8R), axis=1),
        request_R=np.concatenate((plan.request_R, plan.request_R)),
        num_guiding_rows=plan.num_rows,
        sampling_3R=None if plan.sampling_3R is None else np.concatenate((plan.sampling_3R, plan.sampling_3R), axis=1),
        changes_2T=np.stack((partner_T, np.concatenate((lowered_T, lowered_T)))),
    )


def _first_of_blocks(plan: StepPlan, steps: list[RequestStep]) -> Int:
    """Entries whose position is the first of its block."""
    size_R = np.array([step.decoding.rules.kind.block_size for step in steps]).repeat([len(s.widths) for s in steps])
    found: Int = (plan.position_T % size_R.repeat(plan.num_entries_R) == 0).nonzero()[0]
    return found
