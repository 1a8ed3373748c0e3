"""Which masks lookaheads fill: `rank(Spawning) -> number [C]`."""
