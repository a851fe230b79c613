"""The kernel of gradients of tables, lowered through Triton and run on the lowered IR."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle, ttir
from support.compare import assert_close

from pallas_flash import ScoreMod, attention
from pallas_flash.tuning import Tile, TileSizes

# Ragged, with several tiles of both sides, of which some are hidden and some are full.
B, T, S, N, K, H = 2, 37, 53, 2, 1, 24
TILES = TileSizes(forward=Tile(16, 16), dkv=Tile(16, 16), dq=Tile(16, 16))

READS = {
    "rows": ((N,), lambda s, b, h, q, k, x: s * x[h]),
    "columns": ((B, S), lambda s, b, h, q, k, x: s * x[b, k - 1]),
    "diagonals": ((N, 40), lambda s, b, h, q, k, x: s + x[h, q - k + 20]),
    "diagonals-by-batch": ((B, 40), lambda s, b, h, q, k, x: s + x[b, q - k + 20]),
}


@pytest.mark.parametrize("name", READS)
def test_lowered_kernel_of_a_read(name):
    shape, score_mod = READS[name]
    random = np.random.default_rng(0)
    q, k, v, do = (
        jnp.asarray(random.normal(size=(B, n, heads, H)), jnp.float32)
        for n, heads in ((T, N), (S, K), (S, K), (T, N))
    )
    tables = jnp.linspace(0.01, 0.1, N), jnp.asarray(random.normal(size=shape), jnp.float32)

    def gradients(implementation, tables, **extra):
        def loss(slopes, x):
            o = attention(
                *(q, k, v),
                local_window_size=(9, 12),
                alibi_slopes=slopes,
                score_mod=ScoreMod(score_mod, (x,)),
                implementation=implementation,
                **extra,
            )
            return (o * do).sum()

        return jax.grad(loss, (0, 1))(*tables)

    found = ttir.evaluate(lambda *x: gradients("triton", x, config=TILES), *tables)
    want = oracle.compiled(lambda *x: gradients("reference", x))(*tables)
    assert_close(found, want, tolerance=1e-4)
