"""Whether a result is the right one: numbers as people write them, expressions of MATH, values that programs yield."""

from common.scoring.results.expressions import is_same_result
from common.scoring.results.numbers import final_number, marked_number, read_number
from common.scoring.results.symbolic import comparison, is_same_value
from common.scoring.results.values import is_same

__all__ = ["comparison", "final_number", "is_same", "is_same_result", "is_same_value", "marked_number", "read_number"]
