"""Tests that repeat for minutes what a shorter one has shown: with LOPA_SOAK=1 only."""

from __future__ import annotations

import os

import pytest

SOAKS = bool(os.environ.get("LOPA_SOAK"))
soaking = pytest.mark.skipif(not SOAKS, reason="takes minutes: set LOPA_SOAK=1")
