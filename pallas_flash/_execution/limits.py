"""The calls and the devices that each implementation serves.

"mosaic"     kernels for Hopper alone
"triton"     kernels for NVIDIA GPUs of compute capability 8.0 or more
"interpret"  the kernels of "triton", in Pallas's interpreter: any device, slow
"xla"        the same algorithm in plain JAX
"reference"  the dense definition; memory grows with T * S
"""

from collections.abc import Iterable

import jax

from pallas_flash._execution import lowerable
from pallas_flash._jax import compat, device
from pallas_flash._jax.device import Target
from pallas_flash._problem.features import FEW_QUERIES
from pallas_flash._problem.invariance import SERVED_MASKS
from pallas_flash._problem.masks import LeafKind
from pallas_flash._problem.paged import AnyProblem, PagedProblem
from pallas_flash._problem.problem import Problem

IMPLEMENTATIONS = ("mosaic", "triton", "interpret", "xla", "reference")
# The implementations that have tiles.
KERNELS = ("mosaic", "triton", "interpret")

MAX_HEAD_DIM = 256

# The largest head dims in a forward of "mosaic": of queries and keys, and of values.
MOSAIC_HEAD_DIMS = 576, 512

# Copies of "mosaic" take rows of 16 bytes, and so head dims that are multiples of this.
MOSAIC_HEAD_DIM_UNIT = 8

# Pages of "mosaic" have a multiple of this many tokens, because a copy is never smaller. A query
# tile has all heads of a group as rows, and 64 rows.
MOSAIC_PAGE_UNIT, MOSAIC_GROUPS = 16, 64


def not_on_gpu(problem: Problem, target: Target) -> dict[str, str]:
    """Return why "triton" and "mosaic" do not serve a problem on a device, by name."""
    limits = _problem_limits(problem)
    of_device = _device_limits(target) or _jax_limits()
    why = {
        "triton": [*of_device, *limits, *_head_dim_limits(problem)],
        "mosaic": _mosaic_device_limits(target)
        or [*limits, *_mosaic_limits(problem), *_invariance_limits(problem)],
    }
    # Asked last, because it takes time.
    why = {name: x or lowerable.limits(problem, name) for name, x in why.items()}
    return {name: " ".join(sentences) for name, sentences in why.items() if sentences}


def interpreter_limits(problem: Problem, *, look_for_triton: bool) -> str:
    """Return why the interpreter does not serve a problem, or ""."""
    missing = _jax_limits() if look_for_triton else []
    return " ".join([*missing, *_problem_limits(problem), *_head_dim_limits(problem)])


def _problem_limits(p: Problem) -> list[str]:
    """Return why the kernels cannot serve a problem, on any device; whole sentences."""
    limits = []
    if p.symbolic:
        names = ", ".join(map(str, p.symbolic))
        limits.append(f"Got symbolic sizes ({names}), and the kernels are compiled for known ones.")
    return [*limits, *_array_limits(p, _arrays_in_kernels(p))]


def _array_limits(p: AnyProblem, indexed: Iterable) -> list[str]:
    """Return why kernels cannot serve arrays of a call, of which they read some by index."""
    limits = []
    if p.dtype.name == "float64":
        limits.append("Got float64, and the kernels compute in float32.")
    for x in indexed:
        # JAX goes over to indices of 64 bits at 2^32 bytes, which is late for bools.
        if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
            limits.append(
                f"Got an array of {x.dtype} with {x.size} elements, and in the kernels indices "
                "into arrays of one byte a number end at 2^31; a Predicate needs no array."
            )
    return limits


def _head_dim_limits(p: AnyProblem) -> list[str]:
    """Return why most kernels cannot serve a problem by its head dims; whole sentences."""
    width = max(p.head_dim, p.value_dim)
    if width <= MAX_HEAD_DIM:
        return []
    return [f"Got a head dim of {width}, and the kernels serve up to {MAX_HEAD_DIM}."]


def _arrays_in_kernels(p: Problem) -> list:
    """Return the arrays that kernels read by index; none where symbolic sizes rule kernels out."""
    return [] if p.symbolic else jax.tree.leaves((p.mask, p.scores))


def _device_limits(target: Target) -> list[str]:
    """Return why kernels cannot be compiled for a device; whole sentences."""
    if not target.nvidia:
        return [f"The kernels need an NVIDIA GPU, and the device is {target.description}."]
    if target.capability is not None and target.capability < (8, 0):
        major, minor = target.capability
        return [
            "The kernels need an NVIDIA GPU of compute capability 8.0 or more (A100 or newer), and "
            f"the device is {target.description} with {major}.{minor}."
        ]
    return []


def _mosaic_device_limits(target: Target) -> list[str]:
    """Return why kernels for Hopper cannot be compiled for a device; whole sentences."""
    if not target.nvidia or target.capability != (9, 0):
        known = f" with {'.'.join(map(str, target.capability))}" if target.capability else ""
        return [
            "The kernels in Mosaic GPU need a GPU of compute capability 9.0 (H100, H200, GH200), "
            f"and the device is {target.description}{known}."
        ]
    if not compat.has_mosaic_gpu():
        return [
            "The kernels in Mosaic GPU need JAX "
            f"{'.'.join(map(str, compat.MOSAIC_SINCE))} or newer, and this is {jax.__version__}."
        ]
    return []


def _mosaic_limits(p: Problem) -> list[str]:
    """Return why kernels for Hopper do not serve a problem that others may; whole sentences."""
    limits = _mosaic_operand_limits(p)
    most, most_of_values = MOSAIC_HEAD_DIMS
    if p.head_dim > most or p.value_dim > most_of_values:
        limits.append(
            f"Got head dims of {p.head_dim} and {p.value_dim} (of values), and they serve up to "
            f"{most} and {most_of_values}."
        )
    elif _head_dim_limits(p) and p.q_len <= FEW_QUERIES and not p.decodes_prefix:
        queries = "one query" if p.q_len == 1 else f"{p.q_len} queries"
        limits.append(
            f"Got a head dim of {max(p.head_dim, p.value_dim)} and {queries}, and above "
            f"{MAX_HEAD_DIM} they serve more than {FEW_QUERIES} queries, or one without dropout "
            "and score options that sees the first keys."
        )
    if any(x.size > 2**31 for x in _arrays_in_kernels(p)):
        limits.append("Got an array of more than 2^31 elements, and their indices end there.")
    return limits


def _invariance_limits(p: Problem) -> list[str]:
    """Return why a call is not served with `batch_invariant`, if it asks for that."""
    if not p.batch_invariant:
        return []
    options = {
        "dropout, whose random numbers depend on a row's place": p.dropout,
        "a `bias`": p.bias,
        "a `score_mod`": p.rest_of_scores.score_mod,
    }
    limits = [f"Got {name}." for name, x in options.items() if x is not None]
    of_slopes = p.rest_of_scores.positions is not None
    if of_slopes or any(leaf.kind is LeafKind.POSITIONS for leaf in p.mask.leaves):
        limits.append("Got positions as arrays, and keys are summed in the order of the array.")
    elif kinds := [x.kind.value for x in p.mask.leaves if x.kind not in SERVED_MASKS]:
        limits.append(
            f"Got a mask ({', '.join(kinds)}), and it serves `is_causal`, windows, lengths and "
            "`segment_ids`."
        )
    return [*limits, *_head_dim_limits(p)]


def check_invariance(asked: str | None, why: str) -> None:
    """Raise unless "mosaic" computes a batch-invariant call.

    Args:
        asked: the implementation that the call asks for, or None.
        why: why "mosaic" does not serve the call, or "".
    """
    if asked not in (None, "mosaic"):
        raise ValueError(
            '`implementation` must be None or "mosaic" with `batch_invariant=True`, because rows '
            f"of the others depend on the batch; got {asked!r}. Drop one of the two."
        )
    if why:
        raise NotImplementedError(
            f"`batch_invariant` must be False where it does not serve the call; got True. {why} "
            "Drop it, or what it does not serve."
        )


def _mosaic_operand_limits(p: AnyProblem) -> list[str]:
    """Return why kernels for Hopper do not serve a problem by its dtype or head dims."""
    limits = []
    if p.dtype.itemsize != 2:
        limits.append(f"Got {p.dtype.name}, and they serve float16 and bfloat16.")
    if p.head_dim % MOSAIC_HEAD_DIM_UNIT or p.value_dim % MOSAIC_HEAD_DIM_UNIT:
        limits.append(
            f"Got head dims of {p.head_dim} and {p.value_dim} (of values), and they serve "
            f"multiples of {MOSAIC_HEAD_DIM_UNIT}."
        )
    return limits


def _mosaic_paged_limits(p: PagedProblem) -> list[str]:
    """Return why kernels for Hopper do not serve a paged call; whole sentences."""
    limits = [*_mosaic_operand_limits(p), *_head_dim_limits(p)]
    if (size := p.requests.page_size) % MOSAIC_PAGE_UNIT:
        limits.append(f"Got pages of {size} keys, and they serve multiples of {MOSAIC_PAGE_UNIT}.")
    if p.groups > MOSAIC_GROUPS:
        limits.append(
            f"Got {p.groups} query heads for a key head, and with pages they serve up to "
            f"{MOSAIC_GROUPS}."
        )
    quantised = [x.dtype.name for x in (p.key_pages, p.value_pages) if x.dtype != p.dtype]
    if quantised:
        limits.append(f"Got pages of {quantised[0]}, and they serve pages in the query's dtype.")
    return limits


def paged_limits(p: PagedProblem, implementation: str) -> str:
    """Return why an implementation does not serve a paged call, or ""."""
    if implementation in ("xla", "reference"):
        return ""
    if implementation == "mosaic":
        return " ".join(_mosaic_device_limits(device.target()) or _mosaic_paged_limits(p))
    here = _jax_limits()
    if implementation != "interpret":
        target = device.target()
        float8 = _float8_limits([p.key_pages, p.value_pages], target)
        here = _device_limits(target) or float8 or here
    return " ".join(here or [*_array_limits(p, _pages_in_kernels(p)), *_head_dim_limits(p)])


def _pages_in_kernels(p: PagedProblem) -> tuple:
    """Return the pages of keys and of values as kernels read them by index."""
    from pallas_flash._backends.triton import eight_bit

    return jax.eval_shape(eight_bit.pages_of, p)


def _float8_limits(arrays: list, target: Target) -> list[str]:
    """Return why kernels cannot read float8 on a device; whole sentences."""
    if target.capability is None or target.capability >= (8, 9):
        return []
    major, minor = target.capability
    return [
        f"Got {x.dtype.name}, which needs an NVIDIA GPU of compute capability 8.9 or more, and the "
        f"device is {target.description} with {major}.{minor}; int8 needs none."
        for x in arrays
        if x.dtype.name.startswith("float8")
    ][:1]


def backward_limit(problem: Problem, implementation: str) -> str:
    """Return why a backward does not serve a problem that its forward may, or ""."""
    if implementation not in ("mosaic", "triton"):
        return ""
    width = max(problem.head_dim, problem.value_dim)
    if width > MAX_HEAD_DIM:
        return f"Got a head dim of {width}, and kernels of the backward serve up to {MAX_HEAD_DIM}."
    return lowerable.derivative_limit(problem, implementation)


def _jax_limits() -> list[str]:
    """Return why this JAX cannot run the kernels, on any device; whole sentences."""
    if compat.has_triton():
        return []
    return [f"This JAX ({jax.__version__}) has no Triton language for Pallas."]
