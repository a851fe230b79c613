"""Divides a call over the devices of a mesh: by batch elements, by heads and along the sequence.

Batch elements and key/value heads are independent, so that a device computes its shard of them
alone. Only gradients of shared operands are summed over devices. Along the sequence, devices need
the keys of others: `_context` handles that. JAX has three kinds of mesh axes:

* Manual axes, inside `jax.shard_map`: the arrays are shards already. Only a sequence remains to be
  divided, and the call names its axis;
* Explicit axes: types hold the sharding (`explicit`);
* Auto axes: only XLA's partitioner knows the sharding (`auto`).
"""

from pallas_flash._partition.auto import divided
from pallas_flash._partition.axes import (
    ALL_KEYS,
    LSE,
    OUTPUT,
    ROW,
    axes_of,
    letters,
    replace_fields,
    replaced,
    with_origin,
)
from pallas_flash._partition.explicit import explicitly, part_of_device
from pallas_flash._partition.shards import Along, check_lengths

__all__ = [
    "ALL_KEYS",
    "LSE",
    "OUTPUT",
    "ROW",
    "Along",
    "axes_of",
    "check_lengths",
    "divided",
    "explicitly",
    "letters",
    "part_of_device",
    "replace_fields",
    "replaced",
    "with_origin",
]
