"""Public benchmarks: how a row of one becomes a prompt, and whether an answer to it is right.

A benchmark is a table of functions over rows (`Benchmark`), one module each. Prompts, stop strings and rules are those
of lm-eval's tasks of the same names. Programs run in a cell (`common.scoring.programs`).
"""
