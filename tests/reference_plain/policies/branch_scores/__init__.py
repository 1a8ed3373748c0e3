"""Branch confidence C(B): `score(Scoring) -> float64 [B]`."""
