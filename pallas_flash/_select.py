"""Which implementation serves a call, and why not the others.

None         "triton" on an NVIDIA GPU of compute capability 8.0 or more, elsewhere "xla"; on Hopper
             "mosaic" pass by pass where `tune` found that it is faster, or else where it was
             measured to be (`_faster.py`)
"mosaic"     kernels for Hopper alone
"triton"     kernels for all these GPUs
"interpret"  those of "triton", in Pallas's interpreter: any device, slow
"xla"        the same algorithm in plain JAX
"reference"  the dense definition; memory grows with T * S
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from pallas_flash import _compat, _functions, _hardware, _peers
from pallas_flash._context import Choice
from pallas_flash._faster import faster_by_mosaic
from pallas_flash._problem import Problem
from pallas_flash._tiling.sizes import OfCall

IMPLEMENTATIONS = ("mosaic", "triton", "interpret", "xla", "reference")

MAX_HEAD_DIM = 256

# Copies of "mosaic" take rows of 16 bytes, and so head sizes that are multiples of this.
MOSAIC_HEAD_DIM_UNIT = 8


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns.

    Attributes:
        implementation: the one that serves the call.
        reason: why it was chosen.
        refused: why each of the others was not, by name.
        context_parallelism: the method, its `reason` and the others `refused`, where devices divide
            the sequence; else None.
    """

    implementation: str
    reason: str
    refused: Mapping[str, str]
    context_parallelism: Choice | None = None

    def __str__(self) -> str:
        lines = _lines(self.implementation, self.reason, self.refused)
        if self.context_parallelism is not None:
            lines += _lines(*self.context_parallelism)
        return "\n".join(lines)


def _lines(chosen: str, reason: str, refused: Mapping[str, str]) -> list[str]:
    return [f"{chosen}: {reason}", *(f"  not {name}: {why}" for name, why in refused.items())]


class Target(NamedTuple):
    """The device that a call will be compiled for.

    Attributes:
        description: for messages.
        nvidia: whether it is an NVIDIA GPU.
        capability: its compute capability, or None if it cannot be told.
        here: whether this machine has one.
    """

    description: str
    nvidia: bool
    capability: tuple[int, int] | None
    here: bool = True


def target() -> Target:
    """The described GPU of the current abstract mesh if there is one, else JAX's default device."""
    described = _compat.abstract_device()
    if described is None:
        # JAX defines its options at run time.
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(device, jax.Device):
            device = jax.local_devices(backend=device)[0]
    else:
        # The mesh of a sharded program describes its devices too, and those are here.
        name = described.device_kind
        device = next((x for x in jax.local_devices() if x.device_kind == name), None)
        if device is None:
            gpu = described.platform in ("cuda", "gpu")
            capability = _hardware.capability_of(name)
            return Target(f"{name} (described, not here)", gpu, capability, here=False)
    nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    capability = None
    if nvidia:
        major, minor = str(device.compute_capability).split(".")
        capability = (int(major), int(minor))
    return Target(device.device_kind, nvidia, capability)


# Of no tiles, given or tuned.
NO_TILES = OfCall()


def select(problem: Problem, asked: str | None, tiles: OfCall = NO_TILES) -> Explanation:
    """Chooses, or raises for an explicit choice that cannot serve the problem.

    Args:
        problem: the call.
        asked: for which implementation, if any.
        tiles: its own, and what was tuned: their kind says who computes a pass.

    Raises:
        ValueError: if `asked` is no implementation.
        NotImplementedError: if `asked` does not serve the problem on this device.
    """
    if asked is not None and not (isinstance(asked, str) and asked in IMPLEMENTATIONS):
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}; got {asked!r:.60}. "
            f"Use None for the fastest{_peers.hint(_peers.IMPLEMENTATIONS, asked)}."
        )
    limits, refused = _problem_limits(problem), not_on_gpu(problem)
    by, why_not = _by_tiles("forward", tiles)
    # Where no kernel is going to run, its language is not even looked for: importing it takes time.
    anywhere = [*_jax_limits(), *limits] if asked == "interpret" else limits
    refused["interpret"] = " ".join(anywhere) or "Only on request: it is for tests, and slow."
    refused["reference"] = "Only on request: its memory grows with T * S."
    if asked is None:
        if "mosaic" not in refused and "triton" in refused:
            chosen, reason = "mosaic", "the kernels for Hopper serve this call."
        elif "mosaic" not in refused and by == "mosaic":
            chosen, reason = "mosaic", "the kernels for Hopper serve this call."
            refused["triton"] = why_not
        elif "mosaic" not in refused and not by and faster_by_mosaic("forward", problem):
            chosen, reason = "mosaic", "the kernels for Hopper serve this call, and faster."
            refused["triton"] = "Slower than the kernels for Hopper."
        elif "triton" in refused:
            chosen, reason = "xla", "the fastest that serves this call on this device."
        else:
            chosen, reason = "triton", "the kernels serve this call on this GPU."
            if by == "triton":
                refused.setdefault("mosaic", why_not)
        refused.setdefault("mosaic", "Only on request: not known to be faster for this call.")
        refused["xla"] = "Slower than the kernels, which serve this call."
    else:
        chosen, reason = asked, "asked for."
        why = {"interpret": " ".join(anywhere)}.get(asked)
        if asked in ("mosaic", "triton"):
            why = refused.get(asked)
        if why:
            other = "triton" if asked == "mosaic" and "triton" not in refused else "xla"
            raise NotImplementedError(
                f"`implementation` must be one that serves the call; got {asked!r}. "
                f'{why} Use "{other}".'
            )
        for name in ("mosaic", "triton", "xla"):
            refused.setdefault(name, f"{asked!r} was asked for.")
    refused.pop(chosen, None)
    return Explanation(chosen, reason, refused)


def _by_tiles(attention_pass: str, tiles: OfCall) -> tuple[str, str]:
    """Who computes a pass by its tiles, and why nobody else does; "" if they do not say."""
    by = tiles.deciding(attention_pass).computed_by(attention_pass)
    if tiles.given.computed_by(attention_pass):
        return by, f'The call gives tile sizes, which are those of "{by}".'
    return by, f'"{by}" was faster when such calls were tuned on this GPU.'


def not_on_gpu(problem: Problem) -> dict[str, str]:
    """Why "triton" and "mosaic" cannot serve a problem on the current device, where they cannot."""
    limits = _problem_limits(problem)
    why = {
        "triton": [*(_device_limits() or _jax_limits()), *limits],
        "mosaic": _mosaic_device_limits() or [*limits, *_mosaic_limits(problem)],
    }
    # Asked last, because it takes time.
    why = {name: x or _functions.limits(problem, name) for name, x in why.items()}
    return {name: " ".join(sentences) for name, sentences in why.items() if sentences}


def _problem_limits(p: Problem) -> list[str]:
    """Why the kernels cannot serve a problem, on any device; whole sentences."""
    limits = []
    if p.symbolic:
        names = ", ".join(map(str, p.symbolic))
        limits.append(f"Got symbolic sizes ({names}), and the kernels are compiled for known ones.")
    if p.dtype.name == "float64":
        limits.append("Got float64, and the kernels compute in float32.")
    if max(p.head_dim, p.value_dim) > MAX_HEAD_DIM:
        limits.append(
            f"Got a head size of {max(p.head_dim, p.value_dim)}, and the kernels serve up to "
            f"{MAX_HEAD_DIM}."
        )
    for x in _arrays_in_kernels(p):
        # JAX goes over to indices of 64 bits at 2^32 bytes, which is late for bools.
        if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
            limits.append(
                f"Got an array of {x.dtype} with {x.size} elements, and in the kernels indices "
                "into arrays of one byte a number end at 2^31; a Predicate needs no array."
            )
    return limits


def _arrays_in_kernels(p: Problem) -> list:
    """Return the arrays that kernels read by index; none where symbolic sizes rule kernels out."""
    return [] if p.symbolic else jax.tree.leaves((p.mask, p.scores))


def _device_limits() -> list[str]:
    """Why kernels cannot be compiled for the current device; whole sentences."""
    device = target()
    if not device.nvidia:
        return [f"The kernels need an NVIDIA GPU, and the device is {device.description}."]
    if device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        return [
            "The kernels need an NVIDIA GPU of compute capability 8.0 or more (A100 or newer), and "
            f"the device is {device.description} with {major}.{minor}."
        ]
    return []


def _mosaic_device_limits() -> list[str]:
    """Why kernels for Hopper cannot be compiled for the current device; whole sentences."""
    device = target()
    if not device.nvidia or device.capability != (9, 0):
        known = f" with {'.'.join(map(str, device.capability))}" if device.capability else ""
        return [
            "The kernels in Mosaic GPU need a GPU of compute capability 9.0 (H100, H200, GH200), "
            f"and the device is {device.description}{known}."
        ]
    if not _compat.has_mosaic_gpu():
        return [
            "The kernels in Mosaic GPU need JAX "
            f"{'.'.join(map(str, _compat.MOSAIC_SINCE))} or newer, and this is {jax.__version__}."
        ]
    return []


def _mosaic_limits(p: Problem) -> list[str]:
    """Why kernels for Hopper do not serve a problem that others may; whole sentences."""
    limits = []
    if p.dtype.itemsize != 2:
        limits.append(f"Got {p.dtype.name}, and they serve float16 and bfloat16.")
    if p.head_dim % MOSAIC_HEAD_DIM_UNIT or p.value_dim % MOSAIC_HEAD_DIM_UNIT:
        limits.append(
            f"Got head sizes of {p.head_dim} and {p.value_dim} (of values), and they serve "
            f"multiples of {MOSAIC_HEAD_DIM_UNIT}."
        )
    if any(x.size > 2**31 for x in _arrays_in_kernels(p)):
        limits.append("Got an array of more than 2^31 elements, and their indices end there.")
    return limits


def backward_limit(problem: Problem, implementation: str) -> str:
    """Return why a backward does not serve a problem that its forward may, or ""."""
    if implementation not in ("mosaic", "triton"):
        return ""
    return _functions.derivative_limit(problem, implementation)


def in_order(reproducible: bool | None) -> bool:
    """Whether gradients must be the same in every run; None follows XLA's flags."""
    return _compat.xla_is_deterministic() if reproducible is None else bool(reproducible)


def backward_of(
    problem: Problem,
    implementation: str,
    asked: str | None,
    reproducible: bool | None,
    tiles: OfCall = NO_TILES,
) -> tuple[str, str]:
    """The implementation of the backward, and why, if it is not that of the forward.

    Args:
        problem: the call.
        implementation: of the forward.
        asked: the one that the call asks for.
        reproducible: as in `in_order`.
        tiles: as in `select`.
    """
    which = "backward in order" if in_order(reproducible) else "backward"
    by, why_not = _by_tiles(which, tiles)
    faster = not by and faster_by_mosaic(which, problem)
    limit = backward_limit(problem, implementation)
    if (
        (implementation, asked) == ("triton", None)
        and (by == "mosaic" or faster or limit)
        and _has_backward(problem, "mosaic")
    ):
        why = limit or ("it is faster." if faster else _continued(why_not))
        return "mosaic", f'The backward is that of "mosaic": {why}'
    if limit:
        why = limit
    elif implementation != "mosaic" or asked is not None or not _has_backward(problem, "triton"):
        return implementation, ""
    elif by == "triton":
        return by, f'The backward is that of "triton": {_continued(why_not)}'
    elif not by and not faster:
        how = "one for Hopper" if which == "backward" else "reproducible one for Hopper"
        why = f"the {how} is not known to be faster for this call."
    else:
        return implementation, ""
    triton = implementation == "mosaic" and _has_backward(problem, "triton")
    other = "triton" if triton else "xla"
    return other, f'The backward is that of "{other}": {why}'


def _has_backward(problem: Problem, implementation: str) -> bool:
    """Whether kernels serve the backward of a problem on the current device."""
    return implementation not in not_on_gpu(problem) and not backward_limit(problem, implementation)


def _continued(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def backward_with_bias(
    problem: Problem,
    backward_by: str,
    asked: str | None,
    reproducible: bool | None,
    tiles: OfCall = NO_TILES,
) -> tuple[str, str]:
    """The implementation of a backward that gives the gradient of the bias, if it is another.

    Args:
        problem: the call.
        backward_by: that of a backward without.
        asked: the one that the call asks for.
        reproducible: as in `in_order`.
        tiles: as in `select`.

    Returns:
        Its name, and why; "" and "" for the same.
    """
    p, how = problem, 'A gradient of the bias comes with the backward of "{}": {}'
    given = tiles.given.computed_by("backward")
    if p.bias is None or asked is not None or given:
        return "", ""
    which = "backward in order" if in_order(reproducible) else "backward"
    shared = p.bias.size < p.rows * p.kv_len
    faster = shared and faster_by_mosaic(f"{which} with dbias", p)
    if backward_by == "mosaic" and not faster and _has_backward(p, "triton"):
        return "triton", how.format("triton", "that for Hopper is not known to be faster with it.")
    if backward_by == "triton" and faster and _has_backward(p, "mosaic"):
        return "mosaic", how.format("mosaic", "it is faster.")
    return "", ""


def _jax_limits() -> list[str]:
    """Why this JAX cannot run the kernels, on any device; whole sentences."""
    if _compat.has_triton():
        return []
    return [f"This JAX ({jax.__version__}) has no Triton language for Pallas."]


_warned: set[str] = set()


def warn_of_fallback(choice: Explanation, asked: str | None) -> None:
    """Says, once for each reason, that a call on an NVIDIA GPU is not served by the kernels.

    To be called by `attention`, which has one wrapper: the warning points to the user's line.
    """
    if asked is not None or choice.implementation in ("mosaic", "triton") or not target().nvidia:
        return
    reason = choice.refused["triton"]
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f'pallas_flash.attention falls back to the slower "{choice.implementation}": {reason}',
            stacklevel=4,
        )


def tile_capability(implementation: str) -> Any:
    """The compute capability to choose tiles for: the interpreter uses those of the newest GPUs."""
    return None if implementation == "interpret" else target().capability
