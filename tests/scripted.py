"""A generator without a model: it answers a prompt with the same text in capitals.

`python tests/scripted.py ARGUMENTS` is `lopa ARGUMENTS` with it in the model's place, without loading torch, so that a
test can start and kill it many times. SCRIPTED_DELAY: seconds a request. SCRIPTED_STAND: how many requests it answers
before it stands still. SCRIPTED_FAIL, such as `1:kill,2:hang`: ranks that fail in their second request, by an error
(EngineError), a defect (KeyError, with `value` ValueError), a kill (SIGKILL) or a hang in C, in which no signal handler
of Python runs.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as common/commands/__main__.py does

import ctypes
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.config import DecodeConfig, DeviceProfile, InputConfig, MeshConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import EngineError
from common.processes import global_rank
from common.requests import PromptMaker, RequestMaker
from common.text import Writing

EOS = 0
MAX_PROMPT = 200


class ScriptedTokenizer:
    """A character is a token; a conversation is its last message in angle brackets."""

    has_chat_template = True
    marks_reasoning = False
    mask_id = None
    writing = Writing()

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [1] * add_bos + [ord(character) for character in text]

    def chat_text(self, messages: Any, variables: Any = None) -> str:
        return f"<{messages[-1]['content']}>"

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(id) for id in ids if id > 1)


class ScriptedGenerator:
    vocab_size = None

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        mesh = profile.mesh if isinstance(profile.mesh, MeshConfig) else MeshConfig()
        self.profile, self.run = profile, run
        self.tokenizer = ScriptedTokenizer()
        self.max_model_len = profile.max_model_len
        self.num_replicas = mesh.data_parallel_size
        ranks_a_replica = mesh.num_processes // self.num_replicas
        self.replica = global_rank() // ranks_a_replica
        self.is_leader = global_rank() % ranks_a_replica == 0

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        delay = float(os.environ.get("SCRIPTED_DELAY", "0"))
        stand_at = int(os.environ.get("SCRIPTED_STAND", "-1"))
        for number, request in enumerate(requests):
            time.sleep(3600 if number == stand_at else delay)
            if number == 1:
                fail_as_told()
            if len(request.prompt) > MAX_PROMPT:
                yield Rejection(request.id, f"the prompt has {len(request.prompt)} tokens, {MAX_PROMPT} fit")
            else:
                yield answer(request, request.decode or self.run.decode)

    @property
    def requests(self) -> RequestMaker:
        return self.requests_of(self.run.input)

    def requests_of(self, source: InputConfig | None) -> RequestMaker:
        length = self.max_model_len
        prompts = PromptMaker(self.tokenizer, add_bos=source is not None and source.add_bos_token, max_tokens=length)
        return RequestMaker(self.run.decode, prompts, max_model_len=length)

    def check(self, decode: DecodeConfig) -> None:
        """This model can be decoded by any settings."""

    def with_decode(self, decode: DecodeConfig) -> ScriptedGenerator:
        return ScriptedGenerator(self.profile, self.run.model_copy(update={"decode": decode}))

    def describe(self) -> dict[str, Any]:
        return {"engine": "scripted"}

    def close(self) -> None:
        pass


def answer(request: GenerationRequest, decode: DecodeConfig) -> Completion:
    tokens = (*(ord(chr(token).upper()[0]) for token in request.prompt), EOS)
    num_forwards = 1 + len(tokens) // (decode.num_lookahead + 1)
    return Completion(
        id=request.id,
        prompt_length=len(request.prompt),
        token_ids=tokens,
        canvas_token_ids=(*tokens, EOS, EOS),
        num_canvas_tokens=len(tokens) + 2,
        num_forwards=num_forwards,
        num_lookahead_wins=1,
        finish_reason="eos",
        first_step_s=0.01,
        total_s=0.05,
        winner_per_step=(min(1, decode.num_lookahead), *[0] * (num_forwards - 1)),
        window_per_step=(len(request.prompt) + 32, *[32] * (num_forwards - 1)),
    )


def fail_as_told() -> None:
    told = dict(item.split(":") for item in os.environ.get("SCRIPTED_FAIL", "").split(",") if item)
    how = told.get(str(global_rank()))
    if how == "error":
        raise EngineError(f"step 7: out of memory on rank {global_rank()}; lower max_num_requests")
    if how == "defect":
        raise KeyError("a defect")
    if how == "value":
        raise ValueError("a defect")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        semaphore = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).sem_init(semaphore, 0, 0)
        signal.siginterrupt(signal.SIGTERM, False)
        while True:
            ctypes.CDLL(None).sem_wait(semaphore)


if __name__ == "__main__":
    stand_in: Any = types.ModuleType("common.generate")
    stand_in.build_generator = ScriptedGenerator
    stand_in.check_settings = lambda *_: None
    sys.modules["common.generate"] = stand_in
    from common.commands.main import main

    main()
