"""Changes to a pass's logits before they become predictions: classifier-free guidance and the penalty on a repeated
token.
"""

from __future__ import annotations

import numpy as np

from common.decoding.plan import Int, RowField, StepPlan
from common.decoding.scheduling.rules import NO_TOKEN


def with_changes(plan: StepPlan, prompt_length_R: Int, block_size_R: Int) -> StepPlan:
    """Return the plan with `changes_2T` and, under guidance, as many rows more whose prompt is masked, after all."""
    sampling, num_tokens = plan.sampling, plan.num_tokens
    lowered_T = np.full(num_tokens, NO_TOKEN, dtype=np.int64)
    if sampling.penalty_lambda:
        lowered_T[1:] = plan.token_T[:-1]
        lowered_T[plan.position_T % block_size_R.repeat(plan.num_entries_R) == 0] = NO_TOKEN
    own_T = np.arange(num_tokens)
    if not sampling.cfg_scale:
        return plan._replace(changes_2T=np.stack((own_T, lowered_T)))
    is_prompt_T = plan.position_T < prompt_length_R.repeat(plan.num_entries_R)
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
