"""YAML in, frozen checked objects out: the door through which every setting enters.

A device *profile* says what runs the model, a *run* what is decoded, a *sweep* which settings are compared. Nothing
behind this room sees a dict or fills in a default.
"""

from common.config.consistent import BLOCKS_FROM_ZERO, MIN_TEMPERATURE
from common.config.decode import AUTO_LOOKAHEAD, MOST_STOP_TOKENS, NUM_CANDIDATES, DecodeConfig, is_greedy
from common.config.explain import explain, given_value, problem, remedy
from common.config.files import (
    fewshot_file,
    find_config,
    load_profile,
    load_profile_and_run,
    load_run,
    load_yaml,
    machine_file,
    tiles_folder,
)
from common.config.frozen import Frozen, Settings
from common.config.profile import DeviceProfile, GraphConfig, MeshConfig
from common.config.run import BenchmarkName, InputConfig, OutputConfig, RunConfig
from common.config.serve import ServeConfig
from common.config.sweep import OWN, Sweep, SweepLaunch, SweepPoint, load_sweep, slug

__all__ = [
    "AUTO_LOOKAHEAD",
    "BLOCKS_FROM_ZERO",
    "MIN_TEMPERATURE",
    "MOST_STOP_TOKENS",
    "NUM_CANDIDATES",
    "OWN",
    "BenchmarkName",
    "DecodeConfig",
    "DeviceProfile",
    "Frozen",
    "GraphConfig",
    "InputConfig",
    "MeshConfig",
    "OutputConfig",
    "RunConfig",
    "ServeConfig",
    "Settings",
    "Sweep",
    "SweepLaunch",
    "SweepPoint",
    "explain",
    "fewshot_file",
    "find_config",
    "given_value",
    "is_greedy",
    "load_profile",
    "load_profile_and_run",
    "load_run",
    "load_sweep",
    "load_yaml",
    "machine_file",
    "problem",
    "remedy",
    "slug",
    "tiles_folder",
]
