"""On Hopper auto-selection picks, for each pass, the implementation that was measured to be faster.

`scripts/make_tables.py` writes the tables of `_faster.py`; here the rule that reads them meets the
calls that were measured.
"""

import inspect

import jax
import jax.numpy as jnp
import pytest

import pallas_flash
from pallas_flash import _validate
from pallas_flash._faster import faster_by_mosaic
from scripts import make_tables
from scripts.benchmark import choice
from scripts.benchmark.shapes import Shape

# What the choice may cost, as a part of the other implementation's time. Of calls of batch size 1
# a mean over several calls decides.
ALLOWED = {"h200-choice": 0.03, "h200-options": 0.03, "h200-small-calls": 0.1}


def picks_mosaic(r):
    """Return whether the rule picks "mosaic" for the call and the pass of a line of the results."""
    fields = ("case", *"BTSNKDV", "causal", "window", "documents", "lengths")
    shape = Shape(**{name: r[name] for name in fields if name in r}, dtype=r["dtype"])
    operands = [
        jax.ShapeDtypeStruct((shape.B, length, heads, size), jnp.dtype(shape.dtype))
        for length, heads, size in (
            (shape.T, shape.N, shape.D),
            (shape.S, shape.K, shape.D),
            (shape.S, shape.K, shape.value_dim),
        )
    ]
    window = None if shape.window is None else (shape.window - 1, 0)
    arguments = dict(is_causal=shape.causal, local_window_size=window, **shape.arrays())
    names = list(inspect.signature(_validate.validate).parameters)[3:]
    defaults = inspect.signature(pallas_flash.attention).parameters
    given = {name: arguments.get(name, defaults[name].default) for name in names}
    picked = []

    def attend(*operands):
        problem = _validate.validate(*operands, **given)
        picked.append(faster_by_mosaic(choice.pass_of(r), problem))

    jax.eval_shape(attend, *operands)
    return picked[0]


@pytest.mark.parametrize("file", ALLOWED)
def test_choice_is_the_faster_by_the_results(file):
    """Calls with options are left out: their kinds are those of test_select_hopper.py."""
    lines = [(r, gain) for r, gain in choice.gains(file) if not r.get("option")]
    losses = {
        (r["shape"], choice.pass_of(r)): (1 / gain if picks_mosaic(r) else gain) - 1
        for r, gain in lines
    }
    assert losses
    assert not {call: x for call, x in losses.items() if x > ALLOWED[file]}


@pytest.mark.parametrize("attention_pass", ["forward", "backward"])
def test_auto_selected_times_are_of_the_choice(attention_pass):
    """The names of the kernels that ran tell which implementation was timed."""
    others = []
    for r in make_tables.records("h200"):
        if (r["implementation"], r["pass"]) == ("ours", attention_pass):
            ran_mosaic = any(name.endswith("_mosaic_gpu_kernel") for name in r["kernels"])
            if ran_mosaic != picks_mosaic(r):
                others.append(r["shape"])
    assert not others
