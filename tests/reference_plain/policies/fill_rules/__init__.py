"""Which masks of a block a step fills: `choose(Filling) -> bool [M]`."""
