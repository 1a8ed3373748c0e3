"""Gives every Python process simulated NPUs, with this folder on PYTHONPATH and LOPA_SIM_MACHINE=1: what a user starts
runs as on a node of 16 devices, from scripts/run_batch.sh to the ranks of torchrun.

Faults: LOPA_SIM_WRONG names an operator that gives its rows in another order. In processes whose command line holds
LOPA_SIM_HANG the device never comes to the end of a replay, LOPA_SIM_STUCK a replay's launch does not return, and
LOPA_SIM_REFUSE the device of rank 1 has no streams left for a capture.
"""

import os
import sys
from pathlib import Path

if os.environ.get("LOPA_SIM_MACHINE") == "1" and "pip" not in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from sim import export, runtime

    runtime.load()
    from sim.device import SimulatedNpu

    from common.runtime import floors
    from graphs import npu

    _make = npu.Torchair.__init__

    def _with_ge(self: npu.Torchair, *given: object) -> None:
        export.load_torchair()  # takes seconds, so not in every process
        _make(self, *given)

    npu.Torchair.__init__ = _with_ge
    SimulatedNpu().__enter__()
    floors._COPY_BYTES["npu"], floors._MATRIX_SIZE["npu"], floors._SUSTAINED_S = 2**22, 256, 0.001
    if wrong := os.environ.get("LOPA_SIM_WRONG"):
        from sim import table

        from lopa_ascend.ops import twins

        def _first_flipped(*args: object, **options: object) -> object:
            result = getattr(twins, wrong)(*args, **options)
            return (result[0].flip(0), *result[1:]) if isinstance(result, tuple) else result.flip(0)

        table._special()[wrong] = _first_flipped

    def _has(fault: str) -> bool:
        wanted = os.environ.get(fault)
        return bool(wanted) and any(wanted in argument for argument in sys.orig_argv)

    if _has("LOPA_SIM_HANG"):
        import torch

        class _NeverDone(torch.Event):
            def query(self) -> bool:
                return False

        npu.NpuReplay.__call__ = lambda replay: setattr(torch, "Event", _NeverDone)
    if _has("LOPA_SIM_STUCK"):
        import time

        def _launch_that_does_not_return(replay: npu.NpuReplay) -> None:
            time.sleep(10**6)

        npu.NpuReplay.__call__ = _launch_that_does_not_return
    if _has("LOPA_SIM_REFUSE") and os.environ.get("RANK") == "1":
        import torch

        _end = torch.npu.NPUGraph.capture_end

        def _no_streams(graph: torch.npu.NPUGraph) -> None:
            _end(graph)
            raise RuntimeError("stream resource is insufficient, error code is 207008")

        torch.npu.NPUGraph.capture_end = _no_streams
