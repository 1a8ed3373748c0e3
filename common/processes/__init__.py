"""The processes of a run: what a launcher has told this one, the mesh they form, how they are started on one node or
several, and how each of them ends.
"""

from common.processes.cores import cores_of, leave_first_core, poll_on
from common.processes.environment import apply_environment, check_threads
from common.processes.mesh import Mesh, check_started, close_mesh, host_group, init_mesh, resolve_mesh
from common.processes.nodes import Nodes, injected, processes_here, torchrun_options
from common.processes.ranks import global_rank, local_rank, num_started, num_started_here, shown_rank
from common.processes.saying import drop_unwritten, inform, log_to_stderr, say, show
from common.processes.stop import (
    Stopped,
    die_with_launcher,
    die_with_parent,
    drain_on_signals,
    end,
    end_undisturbed,
    keep_until_end,
    restored_signals,
    stop_on_signals,
)
from common.processes.store import meet, share_from_first, shared_count, take_turns, wait_for_all
from common.processes.supervise import read_error_file, supervise, write_error_file

__all__ = [
    "Mesh",
    "Nodes",
    "Stopped",
    "apply_environment",
    "check_started",
    "check_threads",
    "close_mesh",
    "cores_of",
    "die_with_launcher",
    "die_with_parent",
    "drain_on_signals",
    "drop_unwritten",
    "end",
    "end_undisturbed",
    "global_rank",
    "host_group",
    "inform",
    "init_mesh",
    "injected",
    "keep_until_end",
    "leave_first_core",
    "local_rank",
    "log_to_stderr",
    "meet",
    "num_started",
    "num_started_here",
    "poll_on",
    "processes_here",
    "read_error_file",
    "resolve_mesh",
    "restored_signals",
    "say",
    "share_from_first",
    "shared_count",
    "show",
    "shown_rank",
    "stop_on_signals",
    "supervise",
    "take_turns",
    "torchrun_options",
    "wait_for_all",
    "write_error_file",
]
