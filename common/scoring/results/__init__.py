"""Whether a result is the right one: numbers as people write them, expressions of MATH, values that programs yield."""
