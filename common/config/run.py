"""What is decoded: `configs/runs/*.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config.decode import DecodeConfig
from common.config.frozen import Frozen


class InputConfig(Frozen):
    """JSONL with one request a line: `id` (else the line number) and `prompt`, `messages` or `question`.

    prompt_template is applied to lines that have all the fields it names, e.g. "Q: {question}\\nA:". Without it a
    `question` becomes the one message of a chat, or plain text where the model has no chat template.
    """

    path: str
    limit: int | None = Field(default=None, ge=1)
    prompt_template: str | None = None
    add_bos_token: bool = False


class OutputConfig(Frozen):
    path: str = Field(min_length=1)
    metrics_path: str | None = None  # None: beside the output, `<stem>.metrics.json`


class RunConfig(Frozen):
    """What is decoded; `configs/runs/*.yaml`. Relative paths are relative to the working directory."""

    model: str
    lora_path: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    decode: DecodeConfig = DecodeConfig()
    max_num_requests: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    input: InputConfig | None = None
    output: OutputConfig | None = None
