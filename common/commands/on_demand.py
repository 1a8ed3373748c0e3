"""A model that is loaded when a run turns out to need it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from common.config import DeviceProfile, RunConfig

if TYPE_CHECKING:
    from common.generate import Generator


class GeneratorOnDemand:
    """Loads the model when a run turns out to need it, once, and closes it at the end: the `build` of run_batch."""

    def __init__(self, profile: DeviceProfile, run: RunConfig) -> None:
        self._profile, self._run = profile, run
        self._generator: Generator | None = None

    def __call__(self) -> Generator:
        if self._generator is None:
            # Here: a run that turns out to be done has no reason to load torch.
            from common.generate import build_generator

            self._generator = build_generator(self._profile, self._run)
        return self._generator

    def __enter__(self) -> GeneratorOnDemand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After a failure the peers may be gone, and leaving a process group would wait for them.
        if self._generator is not None and error is None:
            self._generator.close()
