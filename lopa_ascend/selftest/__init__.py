"""Tests whether every operation is right on this device: before it serves, and for `lopa doctor --selftest`."""

from lopa_ascend.selftest.checks import Sizes
from lopa_ascend.selftest.choose import attention_form, settle
from lopa_ascend.selftest.examine import Finding, examine, examine_alone, require_correct

__all__ = ["Finding", "Sizes", "attention_form", "examine", "examine_alone", "require_correct", "settle"]
