"""Meshes of simulated devices, and what a program exchanges between them.

The devices are in a process of their own, see eight_devices.py.
"""

import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def make_mesh(axes: dict[str, int], kind: str):
    """Return a mesh with these axes; any kind but those of `KINDS` is for a `shard_map`."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    types = (KINDS.get(kind, AxisType.Auto),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def put(x, mesh, spec):
    """Return a tree of arrays, sharded by one spec."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def collectives(text: str) -> list[tuple[str, str]]:
    """Return the collective operations of a compiled program, with the shapes that they give."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" = (.*?) ({names})(?:-start)?\(", text)
    return [(name, re.sub(r"{[^}]*}", "", shape)) for shape, name in found]
