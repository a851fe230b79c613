"""A call that is refused, as a row of the table in test_validate."""

from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """A call that is refused.

    `arguments` makes what differs from a valid call. `gpu` is the kind of the GPU to compile for,
    the CPU if None; `traced` is an argument that arrives as a tracer; `differentiated` is one with
    respect to which the call is differentiated; `function` is called in place of `attention`, with
    `arguments` alone.
    """

    id: str
    arguments: Callable[[], dict]
    error: type[Exception]
    fragment: str
    gpu: str | None = None
    x64: bool = False
    traced: str | None = None
    differentiated: str | None = None
    function: Callable | None = None


INPUTS = ("query", "key", "value")
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
PER_HEAD = ("sinks", "alibi_slopes")
POSITIONS = ("query_positions", "key_value_positions")
ARRAYS = (*INPUTS, "bias", "mask", *LENGTHS, "segment_ids", *POSITIONS, *PER_HEAD)
FLAGS = ("is_causal", "broadcast_dropout", "return_residual", "return_lse")
