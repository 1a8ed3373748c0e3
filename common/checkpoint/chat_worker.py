"""The process that renders chat templates: a template is a program of whoever made the checkpoint.

JSON lines come in, JSON lines go out: after the imports {"ready": true}, then {"text"} or {"error", "is_rejection"}
for each {"template", "special_tokens", "messages"}. What a template can take is bounded here, but for the time on the
clock, which the parent watches. Started as a script, so that it imports nothing of the engine.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

CPU_SECONDS = 5
MEMORY_BYTES = 2**30
LONGEST_TEXT = 4 * 2**20  # characters

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    _die_with(parent)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        _renderer("{}")
    except Exception as error:
        print(json.dumps({"error": _describe(error)}), file=answers, flush=True)
        return
    _limit_memory()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        _limit_time()
        print(json.dumps(_answer(line)), file=answers, flush=True)


def _answer(line: str) -> dict[str, Any]:
    """The text, or what is wrong and whether the template rejects the messages or fails."""
    from jinja2 import TemplateError

    try:
        request = json.loads(line)
        text = _renderer(json.dumps(request["special_tokens"])).apply_chat_template(
            request["messages"], chat_template=request["template"], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError) as error:
        return {"error": _describe(error), "is_rejection": True}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB", "is_rejection": False}
    except Exception as error:
        return {"error": _describe(error), "is_rejection": False}
    if len(text) > LONGEST_TEXT:
        return {"error": f"it makes a text of {len(text)} characters, more than {LONGEST_TEXT}", "is_rejection": False}
    return {"text": text}


def _describe(error: Exception) -> str:
    """A short line."""
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


def _die_with(parent: int) -> None:
    """Not even kill -9 of the parent leaves this process behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def _limit_time() -> None:
    """From now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_SECONDS, hard))


@lru_cache(maxsize=1)
def _renderer(special_tokens: str) -> Any:
    import jinja2  # noqa: F401  # transformers would miss it at the first template only
    import tokenizers
    import transformers

    no_vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    return fast_tokenizer(tokenizer_object=no_vocabulary, **json.loads(special_tokens))


if __name__ == "__main__":
    main(int(sys.argv[-1]))
