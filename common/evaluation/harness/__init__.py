"""lm-eval's side of things: a generator as one of its models. lm-eval itself is imported only when it is driven."""

from common.evaluation.harness.model import HarnessModel
from common.evaluation.harness.start import drive

__all__ = ["HarnessModel", "drive"]
