"""Replicas on a Ray cluster: Ray Data for files and datasets of requests, Ray Serve for HTTP. Nothing else imports ray.

A replica is an actor with its devices and the engine's processes, which the actor starts as it finds itself on a node.
"""

from common.cluster.batch import run_on_ray
from common.cluster.options import map_options, ray_options
from common.cluster.rows import DecodeRows
from common.cluster.serve import build_app

__all__ = ["DecodeRows", "build_app", "map_options", "ray_options", "run_on_ray"]
