"""Every case of the table is as accurate as a dense computation in the same dtype.

The measure is the error of output, LSE and gradients against float64, in the L2 norm and at the
worst element: at most twice that of the dense computation. Four kinds of rounding are allowed in
place of a dense error that is smaller by luck, as where one key makes every probability exactly 1:

* the backward computes p = exp(s - lse) from a float32 LSE and a float32 argument, which is about
  -log(S) where many keys share a row: p has a relative error of about |lse| + log(S) in float32's
  last place;
* the backward takes delta = rowsum(o * do) from the output in the inputs' dtype, unless that is a
  `SplitOutput`, and with TF32 subtracts it from a dp = do @ v.T of cut operands, where dense
  attention subtracts a sum of dp;
* p and ds are rounded before their products, and o before delta. Where a result has few elements
  (one query, two channels, a bias that all scores share) the dense computation's own error is a
  lucky or unlucky draw: what is expected counts. TF32 cuts them, where the gradient of a bias is no
  product and dense attention's own is exact;
* results are rounded to that dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support import cases, oracle
from support.strict import strictly

import pallas_flash
from pallas_flash._autodiff.vjp import splits_output
from pallas_flash._execution.plan import Wanted

# Results of so few elements have no average, such as the gradient of a bias that all scores share.
FEW = 64

# The relative error of rounding to nearest.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

# The mean error of cutting off.
TF32 = 2.0**-11


def program(implementation, options, **extra):
    """Return the function from q, k, v, do, dlse and operands to what `differentiate` has."""
    call = functools.partial(
        pallas_flash.attention, return_lse=True, implementation=implementation, **options, **extra
    )
    return oracle.compiled(functools.partial(oracle.differentiate, call))


def measured(case, dtype, implementation, problem=None, **extra):
    """The results of a case, computed under all of JAX's strict switches."""
    qkv, cotangents, options = problem or case.problem(dtype)
    operands, options = oracle.split(options)
    run = program(implementation, options, **extra)
    # The search for leaks forgets what is compiled, for which a GPU takes long; "reference" is
    # searched in `test_traces_under_strict_switches`. "triton" has the traces of "interpret".
    with strictly(x64=dtype == "float64", leaks=implementation in ("interpret", "xla")):
        return run(*qkv, *cotangents, **operands)


def _expected_of(problem, tf32, forward_alone=False):
    """The names of results, the exact ones, and those of the dense computation."""
    qkv, cotangents, options = problem
    arrays = qkv if forward_alone else (*qkv, *cotangents)
    exact_delta = False
    if not forward_alone:
        wanted = Wanted(**{name: name in options for name in oracle.OPERANDS})
        exact_delta = splits_output(cases.checked(qkv, options), wanted)
    truth = oracle.solve(*arrays, tf32=tf32, exact_delta=exact_delta, **options)
    operands, options = oracle.split(options)
    run = functools.partial(oracle.dense, tf32=tf32, **options)
    if not forward_alone:
        run = functools.partial(oracle.differentiate, run)
    return oracle.names(operands), truth, oracle.compiled_alike(run)(*arrays, **operands)


@functools.lru_cache(maxsize=len(cases.CASES))
def _expected(case, dtype, *others):
    """The same of a case, which several tests judge."""
    return _expected_of(case.problem(dtype), *others)


def judge(case, dtype, results, problem=None, worst=2, tf32=False, *, expected=None, apart=False):
    """Asserts the rule for each result: all that `oracle.names` names, or those of `oracle.NAMES`,
    or the output and the LSE.

    `worst` is its factor at the worst element, and for less than `FEW` of them. `tf32`: the
    products were of float32 cut to TF32. `expected`: what `_expected_of` returns, where it is
    known. `apart`: the backward was given the logarithm of each sum apart from the maximum.
    """
    if expected is not None:
        names, truth, baseline = expected
    else:
        what = tf32, len(results) == 2
        names, truth, baseline = (
            _expected(case, dtype, *what) if problem is None else _expected_of(problem, *what)
        )
    if len(results) in (2, len(oracle.NAMES)):
        names, baseline = names[: len(results)], baseline[: len(results)]
    shapes = [x.shape for x in baseline]
    assert [x.shape for x in results] == shapes
    assert [x.dtype for x in results] == [x.dtype for x in baseline]
    of_lse = ROUNDING["float64" if dtype == "float64" else "float32"] * size_of_scores(
        np.zeros(1) if apart else truth.values["lse"], case.S
    )
    failures = []
    for name, ours, theirs in zip(names, results, baseline, strict=True):
        rounding = ROUNDING[ours.dtype.name]
        ours, theirs = (oracle.errors(x, truth, name) for x in (ours, theirs))
        floor = oracle.natural(of_lse, truth, name)
        of_terms = oracle.errors(truth.from_rounded.get(name, truth.values[name]), truth, name)
        if name != "lse":
            floor = max(floor, rounding / 2)
        # The gradients of operands are no products.
        cut = tf32 and name[1:] in oracle.OPERANDS
        expected = oracle.of_rounding(TF32 if cut else ROUNDING[dtype], truth, name)
        for norm in ours:
            least = max(theirs[norm], floor, of_terms[norm], expected[norm])
            # The L2 norm of a few numbers is that of the worst.
            few = truth.values[name].size < FEW
            bound = (worst if norm == "max" or few else 2) * least
            if not ours[norm] <= bound:
                failures.append(
                    f"{name} {norm}: {ours[norm]:.2e} > {bound:.2e} (dense {theirs[norm]:.2e})"
                )
    assert not failures, "; ".join(failures)


def size_of_scores(lse, keys: int) -> float:
    """Return the size of scores near the largest: a rounding of it is an error of probabilities."""
    lse = np.abs(np.asarray(lse))
    return 1 + lse.max(where=np.isfinite(lse), initial=0) + np.log(keys)


def judge_max_logits(case, dtype, found, problem=None, *, tf32=False):
    """Asserts the rule for the largest scores, each of which is a number of a few roundings."""
    qkv, _, options = problem or case.problem(dtype)
    truth = oracle.solve(*qkv, tf32=tf32, **options)
    operands, options = oracle.split(options)

    dense = functools.partial(oracle.dense, tf32=tf32, return_max_logits=True, **options)
    *_, baseline = oracle.compiled_alike(dense)(*qkv, **operands)
    assert (found.shape, found.dtype) == (baseline.shape, baseline.dtype)
    rounding = ROUNDING[found.dtype.name]
    ours, theirs = (oracle.errors(x, truth, "max_logits") for x in (found, baseline))
    # Scales, the change of base, a soft cap: each rounds once. For 16 bits its functions are quick.
    quick = "logits_soft_cap" in options and dtype in ("bfloat16", "float16")
    floor = oracle.natural(max(4 * rounding, 2.0**-20 if quick else 0), truth, "max_logits")
    for norm, error in ours.items():
        assert error <= 2 * max(theirs[norm], floor), (norm, error, theirs[norm], floor)


# Small tiles, so that a short sequence has empty, masked and full ones; their sides differ in every
# kernel.
SMALL = pallas_flash.tuning.TileSizes(
    forward=pallas_flash.tuning.Tile(32, 16),
    decode=pallas_flash.tuning.Tile(16, 16),
    dkv=pallas_flash.tuning.Tile(16, 32),
    dq=pallas_flash.tuning.Tile(16, 32),
)


def check_that_nothing_shows(case, implementation, dtype="float32", **extra):
    """NaN or a large number in hidden keys, values and biases and in queries without keys changes
    no bit.
    """
    qkv, cotangents, options = case.problem(dtype)
    operands, rest = oracle.split(options)
    run = program(implementation, rest, **extra)
    clean = run(*qkv, *cotangents, **operands)
    poisoned_operands, _ = oracle.split(cases.poison_bias(case, options))
    arrays = cases.poison(case, qkv, cotangents, options), poisoned_operands
    for large in (np.nan, 1e30):
        (qkv, cotangents), operands = jax.tree.map(
            lambda x, large=large: jnp.where(jnp.isnan(x), large, x).astype(x.dtype), arrays
        )
        poisoned = run(*qkv, *cotangents, **operands)
        for name, a, b in zip(oracle.names(options), clean, poisoned, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
