"""Replay golden traces through the real engine and name the first difference: the engine against its oracle.

A trace is a JSON file with a `model` folder beside it, decode settings, a prompt, and every step's window lengths,
branch scores, winner, fills and lookaheads. Replay runs in float32 on CPU, at temperature 0, without the early stop
at EOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.config import ConfigError, DecodeConfig, DeviceProfile, RunConfig
from common.engine import Engine, build_engine
from common.generate import decode_requests
from common.request import Completion, GenerationRequest, Rejection
from common.scheduler import Scheduler
from common.state import StepRecord

SCORE_TOLERANCE = 1e-3
_REQUIRED = ("model", "decode", "prompt", "generated", "num_forward_steps", "steps")


def replay_files(paths: Sequence[Path], profile: DeviceProfile | None = None) -> int:
    """Replay every trace, print a line each; 0 if all agree, 1 otherwise. Raises ConfigError for an unreadable
    trace."""
    num_failed = 0
    for path in paths:
        trace = read_trace(path)
        difference = first_difference(trace, path.parent / trace["model"], profile or cpu_profile())
        num_failed += difference is not None
        print(f"{path.name}: {difference or 'ok, ' + str(trace['num_forward_steps']) + ' steps'}")
    print(f"{len(paths) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def cpu_profile() -> DeviceProfile:
    return DeviceProfile(name="parity", engine="lopa_cuda", device="cpu", dtype="float32")


def read_trace(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such trace file")
    try:
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); is it a trace?") from None
    missing = [key for key in _REQUIRED if not isinstance(trace, dict) or key not in trace]
    if missing:
        raise ConfigError(f"{path}: not a trace, it lacks {', '.join(missing)}; see tests/golden/README.md")
    return trace


def replay(trace: dict[str, Any], model: Path, profile: DeviceProfile) -> tuple[list[StepRecord], Completion]:
    """Decode the trace's prompt with its settings; every step's record, and the completion."""
    try:
        decode = DecodeConfig(**{**trace["decode"], "stop_at_eos": False})
    except ValueError as error:
        raise ConfigError(f"decode settings of the trace: {' '.join(str(error).split())}") from None
    engine = build_engine(profile, RunConfig(model=str(model), decode=decode))
    try:
        return _replay(engine, decode, trace["prompt"])
    finally:
        engine.close()


def _replay(engine: Engine, decode: DecodeConfig, prompt: list[int]) -> tuple[list[StepRecord], Completion]:
    records: list[StepRecord] = []
    assert decode.mask_token_id is not None, "a trace names its mask id"
    scheduler = Scheduler(
        decode, mask_token_id=decode.mask_token_id, eos_token_id=decode.eos_token_id, observer=records.append
    )
    request = GenerationRequest("parity", tuple(prompt))
    (result,) = decode_requests(iter([request]), scheduler, engine)
    if isinstance(result, Rejection):
        raise ConfigError(f"the trace's prompt cannot be decoded: {result.reason}")
    return records, result


def first_difference(trace: dict[str, Any], model: Path, profile: DeviceProfile) -> str | None:
    """One sentence on the first step or token that disagrees with the trace; None if all agree."""
    records, completion = replay(trace, model, profile)
    for number, (expected, record) in enumerate(zip(trace["steps"], records, strict=False), start=1):
        for what, wanted, found in _compared(expected, record):
            if wanted != found:
                return f"step {number}: {what} {found}, the trace has {wanted}"
        difference = _score_difference(expected["branch_scores"], record.branch_scores)
        if difference:
            return f"step {number}: {difference}"
    if completion.num_forwards != trace["num_forward_steps"]:
        return f"{completion.num_forwards} forward steps, the trace has {trace['num_forward_steps']}"
    for place, (token, expected_token) in enumerate(zip(completion.canvas_token_ids, trace["generated"], strict=False)):
        if token != expected_token:
            return f"generated token {place} is {token}, the trace has {expected_token}"
    if len(completion.canvas_token_ids) != len(trace["generated"]):
        return f"{len(completion.canvas_token_ids)} tokens, the trace has {len(trace['generated'])}"
    return None


def _compared(expected: dict[str, Any], record: StepRecord) -> Iterator[tuple[str, Any, Any]]:
    yield "window lengths", expected["window_lengths"], record.window_lengths
    if "committed" in expected:
        yield "commit lengths", expected["committed"], [record.commit_length] * len(expected["committed"])
    yield "winner is anchor", expected["winner_is_anchor"], record.winner_is_anchor
    yield "fills", {int(key): token for key, token in expected["filled"].items()}, record.filled
    lookahead = [[position, token] for position, token, _ in record.lookahead]
    yield "lookaheads", [list(made[:2]) for made in expected["lookahead"]], lookahead


def _score_difference(expected: list[list[Any]], found: list[float]) -> str | None:
    wanted = [float(score) for score, _ in expected]
    if len(wanted) != len(found):
        return f"{len(found)} branches, the trace has {len(wanted)}"
    for branch, (score, want) in enumerate(zip(found, wanted, strict=True)):
        if not abs(score - want) <= SCORE_TOLERANCE:
            return f"score of branch {branch} is {score:.6f}, the trace has {want:.6f}"
    return None
