"""A check for schemathesis: what is refused is refused soon. How long an answer takes, the model says."""

from __future__ import annotations

from typing import Any

import schemathesis

SLOWEST_S = 2.0


@schemathesis.check
def refused_soon(context: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400:
        assert response.elapsed < SLOWEST_S, f"{response.status_code} after {response.elapsed} s"
