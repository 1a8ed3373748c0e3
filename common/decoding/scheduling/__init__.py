"""What a step does with each request's branches: blocks and windows, rows of a pass, scores and winners, fills, new
lookaheads, ends. Pure host code; `scheduler` is where to begin.
"""
