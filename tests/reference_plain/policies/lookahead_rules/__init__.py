"""How many lookaheads the next step tries: `count(Stepped) -> int`."""
