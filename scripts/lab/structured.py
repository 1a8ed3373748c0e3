"""How long formats take to compile: python scripts/lab/structured.py VOCABULARY.tiktoken OUTPUT.json

VOCABULARY: lines of a token in base64 and its id, such as `qwen.tiktoken` of the package dashscope. Writes seconds, and
the sizes of what comes out.
"""

from __future__ import annotations

import base64
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from common.constraints import Compiler, Format
from common.version import LOPA_VERSION
from scripts.lab.result import write


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT, _WHOLE, _BOOLEAN, _DATE = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"},
                                  {"type": "string", "format": "date"})  # fmt: skip
_UNIT = {"enum": ["celsius", "fahrenheit"]}
_CALL = _object(city=_TEXT, unit=_UNIT, when=_DATE, detail=_object(wind=_BOOLEAN, level=_WHOLE))
_TAGS = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}
FORMATS: dict[str, tuple[str, Any]] = {
    "choice of 3": ("choice", ["yes", "no", "not sure"]),
    "date": ("json", _DATE),
    "weather": ("json", {**_object(city=_TEXT, unit=_UNIT, days=_WHOLE), "required": ["city", "unit"]}),
    "tool call": ("json", _object(name={"const": "get_weather"}, arguments=_CALL)),
    "ten fields": ("json", _object(**{f"field_{n}": (_TEXT, _WHOLE, _BOOLEAN)[n % 3] for n in range(10)})),
    "bounded strings": ("json", _object(name={"type": "string", "maxLength": 20}, age=_WHOLE, tags=_TAGS)),
    "any object": ("json_object", None),
}


def read_vocabulary(path: str) -> tuple[dict[int, bytes], int]:
    """Return the bytes of each token, and the size of Qwen2's vocabulary with its special and unused ids."""
    tokens = {}
    for line in Path(path).read_bytes().splitlines():
        text, number = line.split()
        tokens[int(number)] = base64.b64decode(text)
    return tokens, len(tokens) + 421


def main() -> None:
    tokens, vocab_size = read_vocabulary(sys.argv[1])
    compiler = Compiler(lambda: tokens, vocab_size)
    began = time.perf_counter()
    compiler.automaton(Format("choice", '["a"]'))
    rows: dict[str, dict[str, float]] = {}
    found = {"version": LOPA_VERSION, "machine": platform.processor() or platform.machine(), "tokens": len(tokens),
             "vocabulary_s": round(time.perf_counter() - began, 2), "formats": rows}  # fmt: skip
    for name, (kind, value) in FORMATS.items():
        began = time.perf_counter()
        text = "" if value is None else json.dumps(value)
        own = compiler.automaton(Format(kind, text))  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        rows[name] = {
            "seconds": round(seconds, 2), "states": own.num_states, "classes": own.num_classes,
            "edges": int(own.edges_3E.shape[1]), "shortest": own.shortest,
        }  # fmt: skip
    write(Path(sys.argv[2]), found)


if __name__ == "__main__":
    main()
