"""The pages about the kernels for Hopper name the shared memory that launches ask for."""

import jax
import jax.numpy as jnp
import pytest
from support.compiled_code import shaped
from support.mosaic_cases import checked
from support.repository import ROOT

from pallas_flash._backends.mosaic import (
    backward_launch,
    common,
    forward_kernel,
    forward_tiles,
    tiles,
)
from pallas_flash._backends.mosaic.backward_keys import Grads
from pallas_flash._problem.features import features_of
from pallas_flash._problem.tile_sizes import tile_of

FORWARD, BACKWARD = (ROOT / "docs" / f"hopper-{x}.md" for x in ("forward", "backward"))


def told(page, row):
    """Return the KiB in the last cell of a row of a page's first table that has such a row."""
    line = next(x for x in page.read_text().splitlines() if x.startswith(f"| {row} |"))
    return int(line.strip("| ").split("|")[-1])


def kib(spec, head_dim, is_causal=False):
    """Return the KiB of `spec(problem)`, for 16 heads of 4096 tokens."""
    found = []

    def trace(*qkv):
        found.append(common.smem_bytes(spec(checked(qkv, dict(is_causal=is_causal)))))

    q = shaped(2, 4096, 16, head_dim, dtype=jnp.bfloat16)
    jax.eval_shape(trace, q, q, q)
    return round(found[0] / 1024)


@pytest.mark.parametrize(
    ("head_dim", "is_causal", "row"),
    [
        (64, False, "64, both"),
        (64, True, "64, both"),
        (128, False, "128, non-causal"),
        (128, True, "128, causal"),
        (256, False, "256, non-causal"),
        (256, True, "256, causal"),
    ],
)
def test_page_of_the_forward_has_its_memory(head_dim, is_causal, row):
    def spec(problem):
        return forward_kernel.scratch(problem, forward_tiles.default_tile(features_of(problem)))

    assert kib(spec, head_dim, is_causal) == told(FORWARD, row)


@pytest.mark.parametrize(
    ("head_dim", "grads", "row"),
    [
        (64, Grads.DQ_DK_DV, "backward, 64"),
        (128, Grads.DQ_DK_DV, "backward, 128"),
        (256, Grads.DQ_DK_DV, "backward, 256, CTA 0"),
        (256, Grads.DQ_DK_DV, "backward, 256, CTA 1"),
    ],
)
def test_page_of_the_backward_has_its_memory(head_dim, grads, row):
    def spec(problem):
        tile = tile_of(tiles.default(problem, features_of(problem)), "backward")
        return backward_launch.scratch(problem, tile, grads)

    assert kib(spec, head_dim) == told(BACKWARD, row)
