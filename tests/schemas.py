"""The cases of JSON-Schema-Test-Suite (draft 2020-12) whose schemas formats take, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """valid, invalid: values that the schema accepts and refuses."""

    schema: Any
    valid: list[Any]
    invalid: list[Any]


_CASES = json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text())["cases"]
SUITE = {case["name"]: Case(case["schema"], case["valid"], case["invalid"]) for case in _CASES}
