"""Traces of the published decoding code of other model families, replayed pass by pass: LLaDA, SDAR, Fast-dLLM v2,
LLaDA2. `settings` is where their names become ours.
"""
