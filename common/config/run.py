"""What is decoded: `configs/runs/*.yaml`."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from common.config.decode import DecodeConfig
from common.config.frozen import Settings, refusing_old
from common.config.old_spellings import why_old_of_serve
from common.config.paces import Pace, paced

BenchmarkName = Literal[
    "gsm8k", "math", "math_plain", "humaneval", "humaneval_instruct", "humaneval_plus", "mbpp", "mbpp_plus"
]

_FIELDS_WITH_A_MEANING = ("id", "prompt", "messages", "question", "seed", "chat_template_kwargs")


class InputConfig(Settings):
    """JSONL with one request a line: `id` (else the line number) and `prompt`, `messages` or `question`.

    prompt_template is applied to lines that have all the fields it names, e.g. "Q: {question}\\nA:". Without it a
    `question` becomes the one message of a chat, or plain text where the model has no chat template.
    """

    path: str = Field(min_length=1, description="The JSONL file, plain or gzipped, or Parquet; `-` is standard input.")
    limit: int | None = Field(default=None, ge=1, description="Read only so many requests.")
    prompt_template: str | None = Field(
        default=None, description="The prompt of a line, with the line's fields in braces: `{question}`."
    )
    add_bos_token: bool = Field(
        default=False, description="Put the tokenizer's begin token before prompts that no chat template made."
    )
    benchmark: BenchmarkName | None = Field(
        default=None,
        description="The public benchmark of the lines (docs/evaluation.md): it makes the prompts, sets "
        "`decode.stop` unless that is set, and marks the answers.",
    )
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Solved rows before each question; `null` is as many as lm-eval has."
    )
    fewshot_path: str | None = Field(
        default=None,
        min_length=1,
        description="The JSONL file whose first rows are shown solved; `null` is the benchmark's own, if it has one.",
    )
    apply_chat_template: bool = Field(
        default=False,
        description="Ask a benchmark's question and solved rows as one message of a chat, without the benchmark's "
        "stop strings.",
    )
    run_generated_code: bool | None = Field(
        default=None,
        description="Run answers that are programs, to mark them (docs/evaluation.md); `false` leaves them "
        "unmarked, `null` refuses the run before it starts.",
    )

    settings_field: str | None = Field(
        default=None,
        min_length=1,
        description="The field of a line, such as `decode`, with this request's own keys of `decode` and `seed`; "
        "`null` takes both as data.",
    )

    target_field: str | None = Field(
        default=None,
        min_length=1,
        description="The field of a line, such as `target`, with a text whose likelihood is estimated; nothing is "
        "decoded.",
    )

    @field_validator("settings_field", "target_field")
    @classmethod
    def _is_no_field_of_another_meaning(cls, value: str | None) -> str | None:
        if value in _FIELDS_WITH_A_MEANING:
            raise ValueError(f"a line's {value} has a meaning already: choose another name, such as decode")
        return value

    @model_validator(mode="after")
    def _is_of_a_benchmark(self) -> InputConfig:
        given = [name for name in ("num_fewshot", "fewshot_path") if getattr(self, name) is not None]
        given += ["apply_chat_template"] * self.apply_chat_template
        if given and self.benchmark is None:
            raise ValueError(f"{given[0]} acts on a benchmark's prompts: set benchmark, or remove it")
        if self.benchmark is not None and self.prompt_template is not None:
            raise ValueError("benchmark makes the prompts: remove prompt_template, or benchmark")
        if self.benchmark is not None and self.target_field is not None:
            raise ValueError("benchmark marks answers that are decoded: remove target_field, or benchmark")
        if self.settings_field is not None and self.target_field is not None:
            raise ValueError("settings_field is of lines that are decoded: remove it, or target_field")
        return self


class OutputConfig(Settings):
    """Where results go."""

    path: str = Field(
        min_length=1,
        description="The JSONL file, one line a request; a stopped run resumes with it; `NAME.parquet` is made of "
        "`NAME.jsonl` at the end.",
    )
    metrics_path: str | None = Field(
        default=None, description="The file of the run's numbers; `null` is `<stem>.metrics.json` beside the output."
    )
    step_map: bool = Field(
        default=False,
        description="Add each answer's token ids, and the pass that predicted each, to its record (`token_ids`, "
        "`step_map`).",
    )


class ServeConfig(Settings):
    """What `lopa serve` listens on, and how much it takes. Settings of `decode` are what a request has by default."""

    _has_today_s_keys = refusing_old(why_old_of_serve)

    host: str = Field(default="127.0.0.1", min_length=1, description="The address to listen on; `0.0.0.0` is all.")
    port: int = Field(default=8000, ge=0, le=65535, description="The port to listen on; 0 takes a free one.")
    num_front_ends: int = Field(
        default=1,
        ge=1,
        le=64,
        description="HTTP processes; more than one where one cannot keep up with several replicas.",
    )
    served_model_names: tuple[str, ...] = Field(
        default=(), description="Names of the model for clients, the first in answers; none is the model folder's name."
    )
    api_key_file: str | None = Field(
        default=None, min_length=1, description="A file with one API key a line, beside those of LOPA_API_KEYS."
    )
    max_queued_requests: int = Field(
        default=256, ge=0, description="Requests that may wait beside those being decoded; more get 503."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names beside localhost that clients may use (Host, Origin), where the server listens on this "
        "machine alone and needs no key.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        description="Open connections, as far as the limit of open files allows; new ones then replace idle ones, "
        "or get 503.",
    )
    max_body_bytes: int = Field(
        default=4 * 2**20,
        ge=1,
        description="The longest body of a request; all clients wait some 10 ms a MiB while one is parsed.",
    )
    max_num_lookahead: int | None = Field(
        default=None, ge=0, description="The most lookaheads of a request; `null` is decode's own number."
    )
    drain_timeout_s: float = Field(
        default=25.0, ge=0, le=3600, description="Seconds that requests may go on after SIGTERM."
    )
    engine_silence_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds of silence of a loaded engine after which probes and new requests get 503; must exceed "
        "the longest pass.",
    )
    keep_alive_s: float = Field(
        default=15.0, ge=0.1, le=3600, description="Seconds of silence after which a stream sends a comment line."
    )

    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="The whole address of an OpenTelemetry collector's traces: `http://localhost:4318/v1/traces`.",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_a_whole_address(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            raise ValueError(
                "give the whole address at which the collector takes OTLP over HTTP, such as "
                "http://localhost:4318/v1/traces"
            )
        return value

    @field_validator("served_model_names")
    @classmethod
    def _names_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in value):
            raise ValueError("an empty name is none: remove it")
        return value


class RunConfig(Settings):
    """What is decoded; `configs/runs/*.yaml`. Relative paths are relative to the working directory."""

    model: str = Field(
        min_length=1,
        description="Folder of the checkpoint, or `hf://OWNER/NAME[@REVISION]`, `modelscope://OWNER/NAME`.",
    )
    lora_path: str | None = Field(
        default=None, min_length=1, description="PEFT LoRA, a folder or a hub's name, merged into the weights at load."
    )
    tokenizer: str | None = Field(
        default=None, min_length=1, description="Folder or hub's name of the tokenizer; `null` is `model`."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="`auto` reads the folder's weights; `dummy` makes random ones and needs only a config.json.",
    )
    preset: str | None = Field(
        default=None,
        min_length=1,
        description="A file of configs/presets, or your own: the published settings of a family, as defaults of "
        "`decode`.",
    )
    decode: DecodeConfig = Field(default=DecodeConfig(), description="How requests are decoded.")
    max_num_requests: int = Field(default=1, ge=1, description="Requests decoded together.")
    max_num_batched_tokens: int = Field(
        default=8192,
        ge=1,
        description="Prompt tokens of one pass: further prompts wait, and a longer one begins alone, or is cut "
        "where positions see nothing after their block (`block_diffusion`, `fast_dllm_v2`).",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Share KV between requests that begin alike; which strategies do: docs/cuda.md."
    )
    pace: Pace = Field(
        default="fixed",
        description="Whether the load chooses lookaheads and when blocks open (docs/performance.md; `lopa_cuda` "
        "only): `fixed` decodes as `decode` says; `careful`, `balanced` and `fast` allow ever more loss of "
        "accuracy.",
    )
    seed: int = Field(default=0, ge=0, description="What random tokens and random controls depend on.")
    num_maskings: int = Field(
        default=128,
        ge=1,
        description="Maskings that estimate the likelihood of a given text, or of each of its blocks "
        "(docs/evaluation.md).",
    )
    input: InputConfig | None = Field(default=None, description="Where requests come from.")
    output: OutputConfig | None = Field(default=None, description="Where results go.")
    serve: ServeConfig = Field(default=ServeConfig(), description="How `lopa serve` takes requests.")

    @model_validator(mode="after")
    def _has_its_pace(self) -> RunConfig:
        self.__dict__["decode"] = paced(self.decode, self.pace)
        return self

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer or self.model


def _is_address(value: str) -> bool:
    try:
        return re.fullmatch(r"https?://[^/\s]+/\S+", value) is not None and urlsplit(value).port != 0
    except ValueError:  # no port has that number
        return False
