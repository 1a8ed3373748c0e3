"""The object that users hold: a model in an engine, ready to decode any number of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from common.checkpoint import ModelConfig, Tokenizer, load_model_config, load_tokenizer
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.decoding import (
    TAGS,
    Completion,
    Engine,
    EngineCore,
    GenerationRequest,
    Likelihood,
    Order,
    PassCosts,
    PutWeights,
    ReadWeights,
    Rejection,
    ReleaseMemory,
    ResumeMemory,
    Scheduler,
    Tag,
    TextScorer,
    carry_out,
    decode_requests,
    start_warming,
    taking_orders,
    why_not_routed,
)
from common.errors import ConfigError, EngineError
from common.platforms import build_engine
from common.processes import apply_environment
from common.requests import PromptMaker, RequestMaker, Wishes
from common.runtime import check_decode, facts_of
from common.runtime import check_settings as check_settings
from common.text import answer_text, stop_finder

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class OneAtATime:
    """An engine's state is that of one decoding: a second one in between would corrupt both. None begins after
    `close`."""

    def __init__(self) -> None:
        self._is_busy = False
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def __enter__(self) -> None:
        if self._is_closed:
            raise EngineError("this generator is closed: build another one")
        if self._is_busy:
            raise EngineError("this engine is decoding already: finish or close the first generate() before the next")
        self._is_busy = True

    def __exit__(self, *_: object) -> None:
        self._is_busy = False


class Generator:
    """A loaded model and its decode settings. One in each process; all ranks of a run make the same calls."""

    def __init__(
        self, profile: DeviceProfile, run: RunConfig, engine: Engine, tokenizer: Tokenizer, model_config: ModelConfig,
        one_at_a_time: OneAtATime | None = None,
    ) -> None:  # fmt: skip
        self.profile = profile
        self.run = run
        self._costs = pass_costs(self.run, engine)
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_config = model_config
        self._one_at_a_time = one_at_a_time or OneAtATime()
        self.is_leader = engine.mesh.is_leader  # the one rank of its replica that writes
        self.replica, self.num_replicas = engine.mesh.dp_rank, engine.mesh.dp_size

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        """Decode requests as slots free up, pulling them lazily; completions come in the order in which they end.

        Raises EngineError when it begins while another `generate` of this engine is not over.
        """
        with self._one_at_a_time:
            self._require_memory()
            yield from decode_requests(iter(requests), self._scheduler(), self.engine)

    @contextmanager
    def decoding(self) -> Iterator[EngineCore]:
        """Let callers drive the steps: requests are added and aborted between them, and each step tells what it
        brought. What is unfinished at the end is dropped. Raises EngineError as `generate` does.

        On several ranks all run the same loop, `while core.has_work: core.step()`; the first of a replica adds, aborts
        and calls `core.end()` after it.
        """
        with self._one_at_a_time:
            self._require_memory()
            core = EngineCore(self._scheduler(), self.engine)
            try:
                yield core
            finally:
                core.close()

    @cached_property
    def scorer(self) -> TextScorer:
        """The estimator of likelihoods. Raises ConfigError for a model whose likelihoods are not estimated."""
        decode, capacity = self.run.decode, self.engine.capacity
        reason = why_not_routed(decode, capacity.routing_block)
        if reason is not None:
            raise ConfigError(reason)
        model, run = self.model_config, self.run
        return TextScorer(
            self.engine, decode, mask_token_id=model.mask_of(decode.mask_token_id), shift=model.shift,
            num_maskings=run.num_maskings, seed=run.seed, most_tokens=run.max_num_batched_tokens,
        )  # fmt: skip

    def likelihoods(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Likelihood]:
        """Yield the estimated likelihood of each text after its prompt, both as token ids. All ranks of a replica make
        the same call. Raises ConfigError for a text that cannot be scored, EngineError as `generate` does."""
        with self._one_at_a_time:
            self._require_memory()
            yield from self.scorer.scores(texts)

    def _require_memory(self) -> None:
        released = getattr(self.engine, "released", ())
        if released:
            raise EngineError(f"the memory of {' and '.join(sorted(released))} has been given back: resume it first")

    def follow(self) -> None:
        """Run the steps of a rank that is not the first of its replica, until the first says that it is over."""
        with self.decoding() as core:
            while core.has_work:
                core.step()

    def complete(self, *prompts: Prompt, seed: int | None = None, **wishes: Any) -> list[str]:
        """The texts for some prompts, in their order, each without the stop string that ended it.

        prompts: texts, lists of messages, lists of token ids. wishes: what they want in the place of the run's
        settings, such as max_tokens or temperature (`common.requests.Wishes`). Raises ValueError for a prompt or wish
        that cannot be decoded.
        """
        own, requests = Wishes.read(wishes, seed), []
        for number, prompt in enumerate(prompts):
            made = self.requests.prompts.of(prompt, f"prompt {number}")
            requests.append(self.requests.request(str(number), made, own))
        text_of: dict[str, str] = {}
        for result in self.generate(requests):
            if isinstance(result, Rejection):
                raise ValueError(f"prompt {result.id}: {result.reason}")
            decode = requests[int(result.id)].decode or self.run.decode
            text_of[result.id] = answer_text(self.tokenizer, result.token_ids, decode)
        return [text_of[request.id] for request in requests]

    @cached_property
    def requests(self) -> RequestMaker:
        """The maker of requests from prompts and wishes."""
        return self.requests_of(self.run.input)

    def requests_of(self, source: InputConfig | None) -> RequestMaker:
        """Return a maker of requests whose prompts are those of an input."""
        prompts = PromptMaker(
            self.tokenizer,
            add_bos=source is not None and source.add_bos_token,
            max_tokens=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        return RequestMaker(self.run.decode, prompts, max_model_len=self.max_model_len, check=self.check)

    @property
    def max_model_len(self) -> int:
        """Positions of the longest request."""
        return self.engine.capacity.max_model_len

    @property
    def vocab_size(self) -> int | None:
        return self.engine.capacity.vocab_size

    def check(self, decode: DecodeConfig) -> None:
        """ConfigError for settings by which this model cannot be decoded."""
        check_decode(decode, self.profile, self.model_config)

    def with_decode(self, decode: DecodeConfig) -> Generator:
        """The same loaded model under other decode settings."""
        self.check(decode)
        run, tokenizer = self.run.model_copy(update={"decode": decode}), self.tokenizer
        if decode.mask_token_id != self.run.decode.mask_token_id:
            tokenizer = load_tokenizer(run.tokenizer_folder, self.model_config.mask_of(decode.mask_token_id))
        return Generator(self.profile, run, self.engine, tokenizer, self.model_config, self._one_at_a_time)

    @property
    def weight_version(self) -> str:
        """What the weights in force are called: by whoever replaced them, else by a number."""
        return taking_orders(self.engine).weight_version

    def update_weights_from_disk(self, folder: str, weight_version: str | None = None) -> None:
        """Replace the weights by those of a folder of the same model, all ranks at once. Raises ConfigError, with the
        old ones in force, for a folder that does not fit; EngineError while something is decoded.

        Shapes and names have to be this model's; any float dtype is cast, and weights are quantized, as at a start.
        Tokenizer, special tokens and settings stay.
        """
        self._order(ReadWeights(folder))
        self._order(PutWeights(weight_version))

    def update_weights(
        self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], weight_version: str | None = None
    ) -> None:
        """Replace the weights by tensors on any device, by the checkpoint's names. Raises as
        `update_weights_from_disk` does. Every rank is given all of them.

        named_tensors: pairs are copied to the host's memory as they come, since a trainer's buckets may use theirs
        again; a mapping is read as it stands.
        """
        if not isinstance(named_tensors, Mapping):
            # `clone`: of what is on the host, `cpu` would be the same memory.
            named_tensors = {name: tensor.detach().cpu().clone() for name, tensor in named_tensors}
        self._order(ReadWeights(named_tensors))
        self._order(PutWeights(weight_version))

    def release_memory_occupation(self, tags: Sequence[Tag] = TAGS) -> None:
        """Give the memory of the weights, of the KV cache or of both back to the machine, with captured graphs. Raises
        EngineError while something is decoded."""
        self._order(ReleaseMemory(_tags(tags)))

    def resume_memory_occupation(self, tags: Sequence[Tag] = TAGS) -> None:
        """Take memory again that was given back, read the weights again from the folder that they came from, and
        capture graphs once all is there. Raises ConfigError where memory is missing or weights came from memory, which
        `update_weights` puts back instead."""
        self._order(ResumeMemory(_tags(tags)))

    def _order(self, order: Order) -> None:
        with self._one_at_a_time:
            problem = carry_out(self.engine, order)
        if problem is not None:
            raise ConfigError(problem)

    def describe(self) -> dict[str, Any]:
        """The environment fingerprint that goes into every result file."""
        return {**self.engine.describe(), "profile": self.profile.name, "seed": self.run.seed}

    def close(self) -> None:
        self._one_at_a_time.close()
        self.engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scheduler(self) -> Scheduler:
        decode, model = self.run.decode, self.model_config
        return Scheduler(
            decode,
            mask_token_id=model.mask_of(decode.mask_token_id),
            eos_token_id=model.eos_token_id if decode.eos_token_id is None else decode.eos_token_id,
            num_slots=self.engine.capacity.num_slots,
            seed=self.run.seed,
            stop_finder=partial(stop_finder, tokenizer=self.tokenizer),
            pace=self.run.pace,
            costs=self._costs,
            max_num_batched_tokens=self.run.max_num_batched_tokens,
            facts=facts_of(model),
            enable_prefix_caching=self.run.enable_prefix_caching,
        )


def _tags(tags: Sequence[Tag]) -> tuple[Tag, ...]:
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown or isinstance(tags, str):
        raise ConfigError(f"tags: {tags!r} is not a list of {' and '.join(TAGS)}")
    return tuple(tags)


def build_generator(profile: DeviceProfile, run: RunConfig) -> Generator:
    """Load the run's model on the profile's hardware. Raises ConfigError, MissingCapability or EngineError."""
    apply_environment(profile.environment)
    loops = start_warming()
    model_config = load_model_config(run.model)
    tokenizer = load_tokenizer(run.tokenizer_folder, model_config.mask_of(run.decode.mask_token_id))
    check_decode(run.decode, profile, model_config)
    engine = build_engine(profile, run)
    loops.join()
    return Generator(profile, run, engine, tokenizer, model_config)


def pass_costs(run: RunConfig, engine: Engine) -> PassCosts | None:
    """Measure what a run's `pace` decides by; None where it is `fixed`. ConfigError if the engine cannot tell."""
    if run.pace == "fixed":
        return None
    costs = engine.measure_passes(run.decode)
    if costs is None:
        raise ConfigError(f"pace {run.pace}: this engine does not measure its passes; set it to fixed")
    return costs
