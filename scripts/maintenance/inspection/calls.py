"""Calls of `pallas_flash.attention` to inspect."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax

from scripts.maintenance.inspection.kernels import Program, array, compile_program

PASSES = ("forward", "decode", "delta", "backward", "dkv", "dq", "dbias")
FORWARD = {"forward", "decode"}
MASKS = ("full", "causal", "segments", "window", "lengths", "ragged", "array")
FEATURES = ("bias", "alibi", "softcap", "sinks", "dropout")
IMPLEMENTATIONS = ("triton", "mosaic")
DTYPES = ("bfloat16", "float16", "float32")
# Query heads for each key head; there are 8 in all.
GROUPS = (1, 2, 4, 8)
# Added to a length of many tiles, this gives a length that no tile divides.
RAGGED = 33


def attention_call(
    head_dim: int,
    *,
    dtype: str = "bfloat16",
    mask: str = "full",
    features: Iterable[str] = (),
    backward: bool = True,
    batch: int = 2,
    length: int = 4096,
    queries: int | None = None,
    num_heads: int = 8,
    group: int = 1,
    config: Any = None,
    implementation: str = "triton",
    reproducible: bool = False,
) -> tuple[Callable, list[Any]]:
    """Return a call of `pallas_flash.attention`, and its arguments, for `compile_program`.

    Args:
        head_dim: Head dim of queries, keys and values.
        dtype: The dtype of queries, keys and values.
        mask: One of `MASKS`. "segments" has packed sequences and is causal; "window" is causal over
            1024 keys; "lengths" has a valid length for each batch element; "ragged" is non-causal
            with a length that no tile divides; "array" is one boolean array [T, S].
        features: Some of `FEATURES`; the bias is one array [N, T, S], and differentiated.
        backward: Whether to return the gradients beside the output.
        batch: The batch size.
        length: The number of queries and of keys.
        queries: The number of queries, at the last positions; None for all.
        num_heads: Query heads.
        group: Query heads for each key head.
        config: Passed on; None for the package's choice.
        implementation: One of `IMPLEMENTATIONS`.
        reproducible: Whether the sums of gradients have one order.

    Returns:
        The function and its arguments' shapes.
    """
    # This import is local, so that the package is not needed to inspect other functions.
    import pallas_flash

    if mask == "ragged":
        length -= RAGGED
    queries = queries or length
    q = array((batch, queries, num_heads, head_dim), dtype)
    k = array((batch, length, num_heads // group, head_dim), dtype)
    options: dict[str, Any] = {"is_causal": mask in ("causal", "segments", "window")}
    options |= dict(implementation=implementation, reproducible=reproducible)
    if queries < length:
        options["query_offset"] = length - queries
    arrays = {}
    if mask == "segments":
        ids, of_queries = (array((batch, n), "int32") for n in (length, queries))
        arrays["segment_ids"] = ids if queries == length else (of_queries, ids)
    elif mask == "window":
        options["local_window_size"] = (1023, 0)
    elif mask == "lengths":
        lengths = array((batch,), "int32")
        arrays = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    elif mask == "array":
        arrays["mask"] = array((queries, length), "bool")
    differentiated = {}
    for feature in features:
        match feature:
            case "bias":
                differentiated["bias"] = array((num_heads, queries, length), dtype)
            case "alibi":
                arrays["alibi_slopes"] = array((num_heads,), "float32")
            case "softcap":
                options["logits_soft_cap"] = 50.0
            case "sinks":
                differentiated["sinks"] = array((num_heads,), "float32")
            case "dropout":
                options["dropout_rate"], arrays["dropout_key"] = 0.1, array((2,), "uint32")

    def forward(q, k, v, arrays):
        return pallas_flash.attention(q, k, v, **options, **arrays, config=config)

    def forward_and_backward(q, k, v, arrays, do):
        arrays, extras = ({name: arrays[name] for name in names} for names in (constant, extra))
        out, vjp = jax.vjp(
            lambda q, k, v, extras: forward(q, k, v, {**arrays, **extras}), q, k, v, extras
        )
        return out, vjp(do)

    constant, extra, arrays = list(arrays), list(differentiated), {**arrays, **differentiated}
    return (
        (forward_and_backward, [q, k, k, arrays, q]) if backward else (forward, [q, k, k, arrays])
    )


def inspect_attention(
    head_dim: int,
    *,
    passes: Iterable[str] = PASSES,
    target: str = "h200",
    dump: pathlib.Path | None = None,
    **case: Any,
) -> Program:
    """Compile one call of `pallas_flash.attention` and keeps the kernels of `passes`.

    Args:
        head_dim: Head dim.
        passes: Some of `PASSES`; "dkv" stands also for dk and dv in kernels of their own.
        target: A key of `TARGETS`.
        dump: A folder that receives each kernel's cubin and disassembly.
        **case: See `attention_call`.

    Returns:
        The program, its kernels in the order of `PASSES` and then kernels of no pass.
    """
    passes = tuple(passes)
    function, shapes = attention_call(head_dim, backward=not FORWARD.issuperset(passes), **case)
    program = compile_program(function, *shapes, target=target, dump=dump)
    order = {name: n for n, name in enumerate(PASSES) if name in passes}
    others = set(PASSES) - order.keys()
    kernels = [kernel for kernel in program.kernels if kernel.attention_pass not in others]
    kernels.sort(key=lambda kernel: order.get(kernel.attention_pass, len(PASSES)))
    return dataclasses.replace(program, kernels=tuple(kernels))
