"""Divides a call over the devices of a mesh: by batch elements, by heads and along the sequence.

Batch elements and key/value heads are independent, so that a device computes its shard of them
alone. Only gradients of shared operands are summed over devices. Along the sequence, devices need
the keys of others: `_execution.context` handles that. JAX has three kinds of mesh axes:

* Manual axes, inside `jax.shard_map`: the arrays are shards already. Only a sequence remains to be
  divided, and the call names its axis;
* Explicit axes: types hold the sharding (`explicit`);
* Auto axes: only XLA's partitioner knows the sharding (`auto`).
"""

from pallas_flash._execution.partition.auto import divided as divided
from pallas_flash._execution.partition.axes import ALL_KEYS as ALL_KEYS
from pallas_flash._execution.partition.axes import LSE as LSE
from pallas_flash._execution.partition.axes import OUTPUT as OUTPUT
from pallas_flash._execution.partition.axes import ROW as ROW
from pallas_flash._execution.partition.axes import axes_of as axes_of
from pallas_flash._execution.partition.axes import letters as letters
from pallas_flash._execution.partition.axes import replace_fields as replace_fields
from pallas_flash._execution.partition.axes import with_origin as with_origin
from pallas_flash._execution.partition.explicit import explicitly as explicitly
from pallas_flash._execution.partition.explicit import shard_of_device as shard_of_device
from pallas_flash._execution.partition.shards import Along as Along
from pallas_flash._execution.partition.shards import check_lengths as check_lengths
