"""Replay golden traces through the real engine and name the first difference: the engine against its oracle.

Traces of other families' published code (`families`) say other things of a pass, and are replayed all the same.

A trace is a JSON file with a `model` folder beside it, decode settings, a prompt, and every step's window lengths,
branch scores, winner, fills and lookaheads. Replay runs in float32 on CPU, at temperature 0, without the early stop
at EOS.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import (
    Completion,
    Engine,
    GenerationRequest,
    ModelFacts,
    Rejection,
    Scheduler,
    StepRecord,
    decode_requests,
)
from common.errors import ConfigError, EngineError, what_failed, why_no_file
from common.evaluation.difference import first_step
from common.evaluation.families import compare
from common.evaluation.families.settings import settings_of
from common.evaluation.families.trace import FamilyTrace, is_family_trace, read_family_trace
from common.evaluation.trace import Trace, TraceStep, read_trace
from common.platforms import build_engine
from common.processes import inform
from common.runtime import facts_of
from common.user_files import is_file

logger = logging.getLogger(__name__)


def replay_files(paths: Sequence[Path]) -> int:
    """Replay every trace, print a line each; 0 if all agree, 1 if some differ, 2 if some could not be replayed."""
    codes = [_replay_file(path, cpu_profile()) for path in paths]
    inform(f"{codes.count(0)} passed, {codes.count(1)} failed, {codes.count(2)} not replayed")
    return max(codes, default=0)


def _replay_file(path: Path, profile: DeviceProfile) -> int:
    """Print or log what became of one trace; its exit code."""
    try:
        if not is_file(path):  # opening a pipe would wait for its other end
            raise ConfigError(f"{path}: {why_no_file(path)}; name a trace, a JSON file")
        if is_family_trace(path):
            family_trace = read_family_trace(path)
            num_steps, difference = family_trace.num_forward_steps, family_difference(family_trace, path, profile)
        else:
            trace = read_trace(path)
            num_steps = trace.num_forward_steps
            difference = first_difference(trace, path.parent / trace.model, profile)
    except (ConfigError, EngineError, OSError) as error:
        logger.error("%s: %s", path, what_failed(error).removeprefix(f"{path}: "))
        return 2
    inform(f"{path.name}: {difference or f'ok, {num_steps} steps'}")
    return 0 if difference is None else 1


def cpu_profile() -> DeviceProfile:
    return DeviceProfile(name="parity", engine="lopa_cuda", device="cpu", dtype="float32")


def family_difference(trace: FamilyTrace, path: Path, profile: DeviceProfile) -> str | None:
    """Compare as `first_difference` does, for a trace of another family's published code."""
    made = _decode(path.parent / trace.model, settings_of(trace), trace.prompt, profile)
    return compare.first_difference(trace, *made)


def _decode(
    model: Path, decode: DecodeConfig, prompt: list[int], profile: DeviceProfile
) -> tuple[list[StepRecord], Completion]:
    """Return every step's record, and the completion."""
    config = load_model_config(model)
    _check_token_ids(prompt, decode, config.vocab_size)
    engine = build_engine(profile, RunConfig(model=str(model), decode=decode))
    try:
        return _replay(engine, decode, prompt, facts_of(config))
    finally:
        engine.close()


def _check_token_ids(prompt: list[int], decode: DecodeConfig, vocab_size: int) -> None:
    for key, ids in (("prompt", prompt), ("decode.mask_token_id", [decode.mask_token_id])):
        for token in ids:
            if token not in range(vocab_size):
                raise ConfigError(
                    f"{key}: {token} is not one of the model's {vocab_size} token ids, 0 to {vocab_size - 1}"
                )


def _replay(
    engine: Engine, decode: DecodeConfig, prompt: list[int], facts: ModelFacts
) -> tuple[list[StepRecord], Completion]:
    records: list[StepRecord] = []
    assert decode.mask_token_id is not None, "a trace names its mask id"
    scheduler = Scheduler(
        decode, mask_token_id=decode.mask_token_id, eos_token_id=decode.eos_token_id, observer=records.append,
        facts=facts,
    )  # fmt: skip
    request = GenerationRequest("parity", tuple(prompt))
    (result,) = decode_requests(iter([request]), scheduler, engine)
    if isinstance(result, Rejection):
        raise ConfigError(f"prompt: {result.reason}")
    return records, result


def first_difference(trace: Trace, model: Path, profile: DeviceProfile) -> str | None:
    """One sentence on the first step or token that disagrees with the trace; None if all agree."""
    decode = trace.decode.model_copy(update={"stop_at_eos": False})
    records, completion = _decode(model, decode, trace.prompt, profile)
    difference = first_step(trace.steps, records, _exact, _close)
    if difference is not None:
        return difference
    if len(records) != len(trace.steps):
        return f"{len(records)} steps, the trace holds {len(trace.steps)}"
    if completion.num_forwards != trace.num_forward_steps:
        return f"{completion.num_forwards} forward steps, the trace has {trace.num_forward_steps}"
    for index, (token, expected_token) in enumerate(zip(completion.canvas_token_ids, trace.generated, strict=False)):
        if token != expected_token:
            return f"generated token {index} is {token}, the trace has {expected_token}"
    if len(completion.canvas_token_ids) != len(trace.generated):
        return f"{len(completion.canvas_token_ids)} tokens, the trace has {len(trace.generated)}"
    return None


def _exact(expected: TraceStep, record: StepRecord) -> Iterator[tuple[str, Any, Any]]:
    """What must be the same: positions, tokens, counts. Lists that are the same here are of one length in `_close`."""
    num_branches = len(record.branch_scores)
    if expected.num_branches is not None:
        yield "number of branches", expected.num_branches, num_branches
    yield "window lengths", expected.window_lengths, record.window_lengths
    yield "commit lengths", expected.committed, [record.commit_length] * num_branches
    is_anchor = [False] * (num_branches - 1) + [True]
    yield "branches that are the anchor", [is_it for _, is_it in expected.branch_scores], is_anchor
    yield "winner is anchor", expected.winner_is_anchor, record.winner_is_anchor
    yield "fills", expected.filled, record.filled
    yield "lookaheads", [(made[:2],) for made in expected.lookahead], [made.fills for made in record.lookahead]


def _close(expected: TraceStep, record: StepRecord) -> Iterator[tuple[str, float, float]]:
    """What must agree up to `difference.TOLERANCE`."""
    for branch, ((wanted, _), found) in enumerate(zip(expected.branch_scores, record.branch_scores, strict=True)):
        yield f"score of branch {branch}", wanted, found
    for index, (made, spawned) in enumerate(zip(expected.lookahead, record.lookahead, strict=True)):
        yield f"confidence of lookahead {index}", made[2], spawned.creation_confidence
