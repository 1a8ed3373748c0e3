"""Write docs/settings.md: every key of every settings file, from the models that check them.

python scripts/write_settings.py
"""

from __future__ import annotations

import json
from inspect import cleandoc
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.fields import FieldInfo

from common.config import (
    DecodeConfig,
    DeviceProfile,
    Frozen,
    GraphConfig,
    InputConfig,
    MeshConfig,
    NpuConfig,
    OutputConfig,
    RunConfig,
    ServeConfig,
    Strategy,
)
from common.config.frozen import Policy
from common.config.strategies import STRATEGIES
from common.config.sweep import SweepConfig, SweepRow
from common.policies import calls

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Read this if you write a profile, a run or a sweep, or look up a key.

[A run file](#a-run-file) · [decode](#decode-in-a-run-file) · [input](#input-in-a-run-file) ·
[output](#output-in-a-run-file) · [serve](#serve-in-a-run-file) · [A profile](#a-profile) · [A sweep](#a-sweep)

```yaml
# my_run.yaml; `lopa run MODEL ... --save-run my_run.yaml` writes one
model: checkpoints/SDAR-8B-Chat
preset: sdar                         # the family's published settings
decode: {num_lookahead: 7}
max_num_requests: 16
input: {path: prompts.jsonl}         # lines with a `prompt`, `messages` or `question`
output: {path: answers.jsonl}
```

`scripts/write_settings.py` writes this page from the models in `common/config/`, which check every file.

* A **profile** (`configs/profiles`) says what runs the model, a **run** (`configs/runs`) what is decoded. A **sweep**
  (`configs/sweeps`) compares settings of a run.
* `--set key=value` overrides one key of either: `--set decode.num_lookahead=7`. The value is YAML.
* A rule takes its numbers as arguments: `fill_rule: entropy_bounded(bound=0.35)`. The tables show their defaults.
* A strategy has keys of its own: `strategy: {name: block_diffusion, commit: separate}`. Without the name,
  `strategy: {commit: separate}` or `--set decode.strategy.commit=separate` changes one key of the preset's strategy.
* An unknown key is an error. So is `branching_factor`, which other projects use for both k and k + 1, and
  `trust_remote_code`: no code of a checkpoint is run.
"""
SECTIONS: tuple[tuple[str, type[Frozen]], ...] = (
    ("A run file", RunConfig),
    ("`decode:` in a run file", DecodeConfig),
    *((f"`strategy: {name}` in `decode`", kind) for name, kind in STRATEGIES.items()),
    ("`input:` in a run file", InputConfig),
    ("`output:` in a run file", OutputConfig),
    ("`serve:` in a run file", ServeConfig),
    ("A profile", DeviceProfile),
    ("`mesh:` in a profile", MeshConfig),
    ("`graph:` in a profile", GraphConfig),
    ("`npu:` in a profile", NpuConfig),
    ("A sweep", SweepConfig),
    ("One of a sweep's `rows`", SweepRow),
)
_NAMES = {int: "integer", float: "number", str: "text"}


def page() -> str:
    return "\n".join([HEAD, *(_section(title, model) for title, model in SECTIONS)])


def _section(title: str, model: type[Frozen]) -> str:
    rows = [_row(name, field) for name, field in model.model_fields.items() if not _is_name(model, name)]
    table = ["", "| key | values | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"## {title}", "", cleandoc(model.__doc__ or ""), *table, ""])


def _is_name(model: type[Frozen], name: str) -> bool:
    """Whether this is a strategy's name, which the heading says."""
    return name == "name" and issubclass(model, Strategy)


def _row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", _values(field), _default(field), field.description or "")
    return f"| {' | '.join(cells)} |"


def _values(field: FieldInfo) -> str:
    if isinstance(field.default, Strategy):
        return ", ".join(f"`{name}`" for name in STRATEGIES) + ", or an object"
    parts = get_args(field.annotation) if NoneType in get_args(field.annotation) else (field.annotation,)
    return " or ".join(_kind(part, field) for part in parts)


def _kind(annotation: Any, field: FieldInfo) -> str:
    """An annotation in words; numbers with the bounds that the field sets."""
    inner = get_args(annotation)
    if annotation is NoneType:
        return "`null`"
    if annotation is bool:
        return "`true`, `false`"
    if annotation in _NAMES:
        return _NAMES[annotation] + _bounds(field)
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return "a section"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if get_origin(annotation) in (tuple, list):
        return f"list of {_plural(inner[0])}"
    if get_origin(annotation) is dict:
        return f"keys with {_plural(inner[1])}"
    return " or ".join(_kind(part, field) for part in inner)


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is list:
        return "lists of values"
    return f"{_NAMES[annotation]}s" if annotation in _NAMES else "values" if annotation is Any else "sections"


def _bounds(field: FieldInfo) -> str:
    limits = {type(limit): limit for limit in field.metadata}
    if Ge in limits and Le in limits:
        return f" {limits[Ge].ge} to {limits[Le].le}"
    return "".join(_bound(limit) for limit in field.metadata)


def _bound(limit: object) -> str:
    if isinstance(limit, Ge):
        return f" from {limit.ge}"
    if isinstance(limit, Gt):
        return f" above {limit.gt}"
    if isinstance(limit, Le):
        return f", at most {limit.le}"
    if isinstance(limit, Policy):
        return ": " + ", ".join(f"`{call}`" for call in calls(limit.folder))
    assert isinstance(limit, MinLen), f"say in words what {limit} demands"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Strategy):
        return f"`{value.name}`"
    if isinstance(value, Frozen):
        return "its own"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
