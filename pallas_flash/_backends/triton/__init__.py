"""Attention as Pallas kernels lowered through Triton: `forward` and `backward`.

`table_gradients` is a pass beside `backward`, `tangents` one beside `forward`.
"""

import jax.numpy as jnp

from pallas_flash._backends.triton import backward_dkv, backward_dq, forward_kernel
from pallas_flash._backends.triton.backward_dbias import dbias
from pallas_flash._backends.triton.backward_tables import table_gradients as table_gradients
from pallas_flash._backends.triton.decode_kernel import decode
from pallas_flash._backends.triton.delta_kernel import delta
from pallas_flash._backends.triton.tangent_kernel import tangents as tangents
from pallas_flash._problem import key_center
from pallas_flash._problem.problem import Gradients, Problem
from pallas_flash._problem.scores import LogSum, sinks_gradient
from pallas_flash._problem.tile_sizes import TileSizes, tile_of


def forward(problem: Problem, tiles: TileSizes, *, interpret: bool):
    """Return the output [B, T, N, V] and a `LogSum` of float32 [B, N, T]."""
    if tiles.decode is not None:
        return decode(problem, tile_of(tiles, "decode"), interpret=interpret)
    return forward_kernel.forward(problem, tile_of(tiles, "forward"), interpret=interpret)


def backward(
    problem: Problem,
    o,
    log_sum: LogSum,
    do,
    dlse,
    tiles: TileSizes,
    *,
    want_scale: bool,
    want_bias: bool,
    want_sinks: bool,
    interpret: bool,
) -> Gradients:
    """Return the gradients for the cotangents do [B, T, N, V] and dlse.

    dlse is float32 [B, T, N], or None.
    """
    delta_of_rows = delta(problem, o, do, dlse, interpret=interpret)
    rows = do, log_sum, delta_of_rows

    def launch(kernel, tile):
        return backward_dkv.dkv(problem, *rows, tile_of(tiles, tile), kernel, interpret=interpret)

    if tiles.dkv is not None:
        dk, dv = launch(backward_dkv.pallas_flash_dkv, "dkv")
    else:
        [dk] = launch(backward_dkv.pallas_flash_dk, "dk")
        [dv] = launch(backward_dkv.pallas_flash_dv, "dv")
    center = key_center.center_for_shift(problem, log_sum)
    shifted, shifted_log_sum = key_center.shifted(problem, log_sum, center)
    dq, dscale = backward_dq.dq(
        shifted,
        do,
        shifted_log_sum,
        delta_of_rows,
        tile_of(tiles, "dq"),
        want_scale=want_scale,
        interpret=interpret,
    )
    dlse = None if dlse is None else jnp.moveaxis(dlse, 1, 2)
    dscale = None if dscale is None else dscale.sum()
    dq, dscale = key_center.whole_sums(problem, center, *rows[1:], dlse, dq, dscale)
    return Gradients(
        dq,
        dk,
        dv,
        scale=dscale,
        bias=dbias(problem, *rows, tile_of(tiles, "dq"), interpret=interpret)
        if want_bias
        else None,
        sinks=sinks_gradient(problem.sinks, *rows[1:]) if want_sinks else None,
    )
