"""YAML in, frozen checked objects out: the door through which every setting enters.

A device *profile* says what runs the model, a *run* what is decoded, a *sweep* which settings are compared. Nothing
behind this room sees a dict or fills in a default.
"""

from common.config.decode import AUTO_LOOKAHEAD, NUM_CANDIDATES, DecodeConfig
from common.config.explain import explain
from common.config.files import find_config, load_profile, load_profile_and_run, load_run, load_yaml
from common.config.frozen import Frozen
from common.config.profile import DeviceProfile, GraphConfig, MeshConfig
from common.config.run import InputConfig, OutputConfig, RunConfig
from common.config.serve import ServeConfig
from common.config.sweep import load_sweep, slug

__all__ = [
    "AUTO_LOOKAHEAD",
    "NUM_CANDIDATES",
    "DecodeConfig",
    "DeviceProfile",
    "Frozen",
    "GraphConfig",
    "InputConfig",
    "MeshConfig",
    "OutputConfig",
    "RunConfig",
    "ServeConfig",
    "explain",
    "find_config",
    "load_profile",
    "load_profile_and_run",
    "load_run",
    "load_sweep",
    "load_yaml",
    "slug",
]
