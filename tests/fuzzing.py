"""Fuzz tests that are ordinary tests: by default a few examples, the same each time, so that they cost a second.

With LOPA_FUZZ_SECONDS set, each test draws new ones until so many seconds are over. Write `@fuzzed` above
`@given(...)`, and what has to end soon and stay small inside `with bounded():`.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SECONDS = float(os.environ.get("LOPA_FUZZ_SECONDS") or 0)
_EXAMPLES_A_ROUND = 200


def fuzz_settings(max_examples: int = 30) -> settings:
    """One round of examples, from hypothesis: the same `max_examples` ones each time, or 200 new ones when fuzzing."""
    suppressed = [*settings().suppress_health_check, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=_EXAMPLES_A_ROUND if SECONDS else max_examples,
        derandomize=not SECONDS,
        suppress_health_check=suppressed,
        print_blob=True,
    )


def fuzzed(test: Callable[..., Any]) -> Callable[..., None]:
    """A test of `given` under `fuzz_settings`, repeated until the time is over; says how many examples it took."""
    inner, count = test.hypothesis.inner_test, 0  # type: ignore[attr-defined]

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        inner(*args, **kwargs)

    test.hypothesis.inner_test = functools.wraps(inner)(counted)  # type: ignore[attr-defined]
    one_round = fuzz_settings()(test)

    @functools.wraps(test)
    def rounds(*args: Any, **kwargs: Any) -> None:
        end = time.monotonic() + SECONDS
        one_round(*args, **kwargs)
        while time.monotonic() < end:
            one_round(*args, **kwargs)
        print(f"{test.__name__}: {count} examples")

    return rounds


def restored(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder with these files, as it was before a case damaged them."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@contextmanager
def bounded(seconds: float = 20, gibibytes: float = 2) -> Iterator[None]:
    """Fails where the body takes longer, whatever it catches, or makes this process larger by more.

    seconds: of a processor, since others may have it meanwhile; on the clock a body that waits has ten times as long.
    """

    def overdue(*_: object) -> None:
        pytest.fail(f"took longer than {seconds} s")  # no Exception, which the body might catch

    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew, so that a failure repeats
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds)}
    previous = {number: signal.signal(number, overdue) for number in limits}
    for timer, limit_s in limits.values():
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for number, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, previous[number])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert grown < gibibytes, f"took {grown:.1f} GiB"
