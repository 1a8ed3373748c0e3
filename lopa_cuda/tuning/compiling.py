"""Tiles into Triton's cache on disk, by several processes: compiling takes longer than timing, and one process compiles
one kernel at a time. Importing this needs Triton, running it a CUDA device.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch
from triton.errors import TritonError

from common.errors import EngineError
from lopa_cuda.kernels.linear import launch_linear
from lopa_cuda.tuning.candidates import Case
from lopa_cuda.wgmma import KIND_OF

_DTYPES = {kind: dtype for dtype, kind in KIND_OF.items()}
_COMPILER_GAVE_UP = "PassManager::run failed"  # a plain RuntimeError
_MOST_JOBS = 12  # each takes some GiB of the device


def num_jobs() -> int:
    return min(_MOST_JOBS, len(os.sched_getaffinity(0)))


def compile_all(cases: list[Case]) -> None:
    """Compile tiles. Those that the device cannot take are left out: timing finds them again. Raises EngineError where
    a process is killed."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_jobs(), mp_context=context, initializer=_end_with_parent) as pool:
            for _ in pool.map(_compile, cases, chunksize=4):
                pass
    except BrokenProcessPool as error:
        raise EngineError(
            f"one of {num_jobs()} processes that compile tiles was killed, as by a host without memory: start again, "
            "what is compiled is kept"
        ) from error


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it: a worker would outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _compile(case: Case) -> None:
    """Compile by one launch, over whatever the memory holds."""
    shape, num_tokens, config = case
    dtype, is_quantized = _DTYPES[shape.kind], shape.kind != "bf16"
    weight_CK, x_TK = (torch.empty(n, shape.num_in, dtype=dtype, device="cuda") for n in (shape.num_out, num_tokens))
    scale_C, scale_T = (torch.empty(n, device="cuda") if is_quantized else None for n in (shape.num_out, num_tokens))
    try:
        launch_linear(x_TK, scale_T, weight_CK, None, scale_C, config, is_gated=shape.fusion == "swiglu")
        torch.cuda.synchronize()
    except (TritonError, RuntimeError) as error:
        if not is_refusal(error):
            raise


def is_refusal(error: Exception) -> bool:
    """Whether the error says that a tile takes more than the device has, or than the compiler can do."""
    return isinstance(error, TritonError) or _COMPILER_GAVE_UP in str(error)
