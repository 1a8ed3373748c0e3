"""What is decoded: `configs/runs/*.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.decode import DecodeConfig
from common.config.frozen import Settings
from common.config.serve import ServeConfig


class InputConfig(Settings):
    """JSONL with one request a line: `id` (else the line number) and `prompt`, `messages` or `question`.

    prompt_template is applied to lines that have all the fields it names, e.g. "Q: {question}\\nA:". Without it a
    `question` becomes the one message of a chat, or plain text where the model has no chat template.
    """

    path: str = Field(min_length=1, description="The JSONL file, plain or gzipped; `-` is standard input.")
    limit: int | None = Field(default=None, ge=1, description="Read the first so many requests only.")
    prompt_template: str | None = Field(
        default=None, description="The prompt of a line, with the line's fields in braces, such as `{question}`."
    )
    add_bos_token: bool = Field(
        default=False, description="Put the tokenizer's begin token in front of prompts that no chat template made."
    )


class OutputConfig(Settings):
    """Where results go."""

    path: str = Field(
        min_length=1, description="The JSONL file, one line a request; a run that was stopped goes on with it."
    )
    metrics_path: str | None = Field(
        default=None, description="The file of the run's numbers; `null` is `<stem>.metrics.json` beside the output."
    )


class RunConfig(Settings):
    """What is decoded; `configs/runs/*.yaml`. Relative paths are relative to the working directory."""

    model: str = Field(min_length=1, description="Folder of the checkpoint.")
    lora_path: str | None = Field(
        default=None, min_length=1, description="PEFT LoRA folder that is merged into the weights at load."
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="`auto` reads the folder's weights; `dummy` makes random ones, for which a config.json is enough.",
    )
    decode: DecodeConfig = Field(default=DecodeConfig(), description="How requests are decoded.")
    max_num_requests: int = Field(default=1, ge=1, description="Requests that are decoded together.")
    max_num_batched_tokens: int = Field(
        default=8192,
        ge=1,
        description="Prompt tokens that may begin in one pass; others wait for the next, and a longer prompt begins "
        "without others.",
    )
    branch_budget: Literal["all", "auto"] = Field(
        default="all",
        description="`all` tries every lookahead; `auto` tries them only while they bring more tokens than the time "
        "of their rows is worth, so that fewer are tried as load rises; tokens then depend on load (`lopa_cuda`).",
    )
    seed: int = Field(default=0, ge=0, description="What random tokens and random controls depend on.")
    input: InputConfig | None = Field(default=None, description="Where requests come from.")
    output: OutputConfig | None = Field(default=None, description="Where results go.")
    serve: ServeConfig = Field(default=ServeConfig(), description="How `lopa serve` takes requests.")
