"""The engine's passes beside a published trace's: windows, candidates, fills, edits, KV that becomes final, tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from common.decoding import Completion, StepRecord
from common.evaluation.difference import first_step
from common.evaluation.families.trace import FamilyStep, FamilyTrace

_FINAL = ("prefill", "commit")  # kinds of passes that write final KV


def first_difference(trace: FamilyTrace, records: Sequence[StepRecord], completion: Completion) -> str | None:
    """One sentence on the first pass or token that disagrees with the trace; None if all agree."""
    difference = first_step(trace.steps, records, _exact, _close)
    if difference is not None:
        return difference
    if not len(records) == len(trace.steps) == trace.num_forward_steps:
        return f"{len(records)} steps, the trace holds {len(trace.steps)} of {trace.num_forward_steps}"
    return _text_difference(trace, completion)


def _exact(expected: FamilyStep, record: StepRecord) -> Iterator[tuple[str, Any, Any]]:
    if expected.final is not None or record.revision is not None:
        yield from _revision(expected, record)
        return
    start, length = record.start, record.commit_length
    yield "window", list(expected.window), [start, start + record.window_lengths[-1]]
    written = [start, start + length] if length else None
    if expected.kind in _FINAL:
        yield "KV written", list(expected.kv_written or ()), written
    if expected.block_kv_written is not None:
        yield "KV written", list(expected.block_kv_written), written
    masks = {position: made.token for position, made in record.candidates.items() if made.current is None}
    yield "candidates", {position: token for position, (token, _) in expected.candidates.items()}, masks
    yield "entropies beside candidates", [position for position in expected.entropy or () if position not in masks], []
    yield "fills", expected.filled, record.filled
    if expected.edit_candidates is not None:
        yield (
            "edit candidates",
            {position: token for position, (token, _) in expected.edit_candidates.items()},
            _edits(record),
        )
        yield "edits", expected.edited or {}, record.edited


def _revision(expected: FamilyStep, record: StepRecord) -> Iterator[tuple[str, Any, Any]]:
    """What a pass did to a block that is revised. Its KV may also be written by the next block's first pass, which then
    begins with it."""
    made = record.revision
    yield "revises a block", expected.final is not None, made is not None
    if made is None:
        return
    yield "window's end", expected.window[1], record.start + record.window_lengths[-1]
    masks = {position: found.token for position, found in record.candidates.items() if found.current is None}
    yield "candidates", {position: token for position, (token, _) in expected.candidates.items()}, masks
    yield "candidates that are the second best", expected.fallback, list(made.runners_up)
    edits = {position: token for position, (token, _) in (expected.edit_candidates or {}).items()}
    yield "edit candidates", edits, _edits(record)
    if expected.quota is not None:
        yield "quota", expected.quota, made.quota
    yield "last round", expected.final, made.is_final
    yield "passes of the budget", expected.post_steps, made.num_post
    yield "fills", expected.filled, record.filled
    yield "edits", expected.edited or {}, record.edited
    yield "replaced tokens", expected.replaced, made.replaced
    yield "escapes", expected.escape, list(made.escaped)
    yield "deletions", expected.deleted, list(made.deleted)
    yield "insertions", expected.split, list(made.inserted)
    yield "block", expected.after, list(made.after)
    yield "marks", expected.original, list(made.first)


def _edits(record: StepRecord) -> dict[int, int]:
    """Filled positions at which another token is the most probable."""
    filled = {position: made for position, made in record.candidates.items() if made.current is not None}
    return {position: made.token for position, made in filled.items() if made.token != made.current}


def _close(expected: FamilyStep, record: StepRecord) -> Iterator[tuple[str, float, float]]:
    for position, (_, probability) in {**expected.candidates, **(expected.edit_candidates or {})}.items():
        yield f"probability at position {position}", probability, record.candidates[position].probability
    for position, entropy in (expected.entropy or {}).items():
        yield f"entropy at position {position}", entropy, -record.candidates[position].confidence


def _text_difference(trace: FamilyTrace, completion: Completion) -> str | None:
    """Compare up to the end token, after which published code leaves what it likes."""
    if trace.answer is not None:
        if list(completion.token_ids) != trace.answer:
            return f"the answer is {list(completion.token_ids)}, the trace has {trace.answer}"
        has_stopped = completion.finish_reason in ("eos", "stop")
        if has_stopped != (trace.finish == "stop"):
            return f"the answer ends with {completion.finish_reason}, the trace's with {trace.finish}"
        return None
    stops = trace.decode.get("stop_tokens") or [trace.decode.get("stop_token"), trace.decode.get("eos_token")]
    found, wanted = completion.canvas_token_ids, trace.generated
    for index, (token, expected) in enumerate(zip(found, wanted, strict=False)):
        if token != expected:
            return f"generated token {index} is {token}, the trace has {expected}"
        if token in stops:
            return None
    rest = wanted[len(found) :]
    if any(token != trace.decode["mask_id"] for token in rest):
        return f"{len(found)} tokens, the trace has {len(wanted)}"
    return None
