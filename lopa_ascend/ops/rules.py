"""How the twins say that a call breaks a documented rule of torch_npu.

torch_npu's own shape kernels accept most wrong calls (a mask of the wrong shape, lengths that are not cumulative, a
page size of 64, ...), and the device then answers with garbage. So every rule is checked where a test can see it.
"""

from __future__ import annotations

import torch

from common.errors import ConfigError


class OpRuleError(ConfigError):
    """A call breaks a documented rule of an Ascend operator: the model or a setting asks for what it cannot compute."""

    def __init__(self, op: str, rule: str, value: object) -> None:
        super().__init__(f"{op}: {rule}; given {_describe(value)}")
        self.op = op
        self.rule = rule
        self.value = value


def require(holds: bool, op: str, rule: str, value: object) -> None:
    """Raise OpRuleError unless the rule holds; `value` is what the caller gave, formatted only on failure."""
    if not holds:
        raise OpRuleError(op, rule, value)


def refuse(op: str, **unmodelled: object) -> None:
    """Refuse options that torch_npu has and this engine does not use: the twins do not guess what they would do."""
    for name, value in unmodelled.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name}={_describe(value)} is not modelled by the CPU twin")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.is_contiguous() else " (not contiguous)"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}"
    if isinstance(value, tuple):
        return ", ".join(_describe(part) for part in value)
    return str(value)
