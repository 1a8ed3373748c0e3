"""YAML in, frozen checked objects out: the door through which every setting enters.

A device *profile* says what runs the model, a *run* what is decoded, a *sweep* which settings are compared. Nothing
after this room sees a dict or fills in a default.
"""

from common.config.consistent import MIN_TEMPERATURE
from common.config.decode import MOST_STOP_TOKENS, NUM_CANDIDATES, DecodeConfig, is_greedy
from common.config.explain import given_value, keys_of, problem, remedy
from common.config.files import as_yaml, load_profile, load_profile_and_run, load_run, load_yaml
from common.config.frozen import Frozen, Settings
from common.config.names import (
    fewshot_file,
    find_config,
    folder_of,
    machine_file,
    shipped_names,
    short_name,
    tiles_folder,
)
from common.config.old_spellings import recorded, renewed
from common.config.paces import Pace, Way, is_paced, paced, ways_of
from common.config.profile import DeviceProfile, GraphConfig, MeshConfig, NpuConfig
from common.config.run import BenchmarkName, InputConfig, OutputConfig, RunConfig, ServeConfig
from common.config.strategies import (
    D2F,
    TAKE_ANY_LENGTH,
    BlockDiffusion,
    FastDllm,
    FastDllmV2,
    Levenshtein,
    MultiBlock,
    Strategy,
    name_after,
)
from common.config.sweep import OWN, Sweep, SweepLaunch, SweepPoint, load_sweep, slug

__all__ = [
    "D2F",
    "MIN_TEMPERATURE",
    "MOST_STOP_TOKENS",
    "NUM_CANDIDATES",
    "OWN",
    "TAKE_ANY_LENGTH",
    "BenchmarkName",
    "BlockDiffusion",
    "DecodeConfig",
    "DeviceProfile",
    "FastDllm",
    "FastDllmV2",
    "Frozen",
    "GraphConfig",
    "InputConfig",
    "Levenshtein",
    "MeshConfig",
    "MultiBlock",
    "NpuConfig",
    "OutputConfig",
    "Pace",
    "RunConfig",
    "ServeConfig",
    "Settings",
    "Strategy",
    "Sweep",
    "SweepLaunch",
    "SweepPoint",
    "Way",
    "as_yaml",
    "fewshot_file",
    "find_config",
    "folder_of",
    "given_value",
    "is_greedy",
    "is_paced",
    "keys_of",
    "load_profile",
    "load_profile_and_run",
    "load_run",
    "load_sweep",
    "load_yaml",
    "machine_file",
    "name_after",
    "paced",
    "problem",
    "recorded",
    "remedy",
    "renewed",
    "shipped_names",
    "short_name",
    "slug",
    "tiles_folder",
    "ways_of",
]
