"""Which implementation serves a call, and why not the others.

None         "triton" on an NVIDIA GPU of compute capability 8.0 or more, elsewhere "xla"
"triton"     the kernels, compiled
"interpret"  the kernels, in Pallas's interpreter: any device, slow
"xla"        the same algorithm in plain JAX
"reference"  the dense definition; memory grows with T * S
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from pallas_flash import _compat, _hardware
from pallas_flash._problem import Problem

IMPLEMENTATIONS = ("triton", "interpret", "xla", "reference")

MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns.

    Attributes:
        implementation: the one that serves the call.
        reason: why it was chosen.
        refused: why each of the others was not, by name.
    """

    implementation: str
    reason: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.implementation}: {self.reason}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.refused.items()])


class Target(NamedTuple):
    """The device that a call will be compiled for.

    Attributes:
        description: for messages.
        nvidia: whether it is an NVIDIA GPU.
        capability: its compute capability, or None if it cannot be told.
    """

    description: str
    nvidia: bool
    capability: tuple[int, int] | None


def target() -> Target:
    """The described GPU of the current abstract mesh if there is one, else JAX's default device."""
    described = _compat.abstract_device()
    if described is not None:
        name = described.device_kind
        gpu = described.platform in ("cuda", "gpu")
        capability = _hardware.capability_of(name)
        return Target(f"{name} (described, not here)", gpu, capability)
    # JAX defines its options at run time.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    capability = None
    if nvidia:
        major, minor = str(device.compute_capability).split(".")
        capability = (int(major), int(minor))
    return Target(device.device_kind, nvidia, capability)


def select(problem: Problem, asked: str | None) -> Explanation:
    """Chooses, or raises for an explicit choice that cannot serve the problem.

    Raises:
        ValueError: if `asked` is no implementation.
        NotImplementedError: if `asked` does not serve the problem on this device.
    """
    if asked is not None and not (isinstance(asked, str) and asked in IMPLEMENTATIONS):
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}; got {asked!r:.60}. "
            "Use None for the fastest."
        )
    limits = _problem_limits(problem)
    refused = {}
    if on_gpu := [*(_device_limits() or _jax_limits()), *limits]:
        refused["triton"] = " ".join(on_gpu)
    # Where no kernel is going to run, its language is not even looked for: importing it takes time.
    anywhere = [*_jax_limits(), *limits] if asked == "interpret" else limits
    refused["interpret"] = " ".join(anywhere) or "Only on request: it is for tests, and slow."
    refused["reference"] = "Only on request: its memory grows with T * S."
    if asked is None:
        if "triton" in refused:
            chosen, reason = "xla", "the fastest that serves this call on this device."
        else:
            chosen, reason = "triton", "the kernels serve this call on this GPU."
            refused["xla"] = "Slower than the kernels, which serve this call."
    else:
        chosen, reason = asked, "asked for."
        why = {"triton": refused.get("triton"), "interpret": " ".join(anywhere)}.get(asked)
        if why:
            raise NotImplementedError(
                f"`implementation` must be one that serves the call; got {asked!r}. "
                f'{why} Use "xla".'
            )
        for name in ("triton", "xla"):
            refused.setdefault(name, f"{asked!r} was asked for.")
    refused.pop(chosen, None)
    return Explanation(chosen, reason, refused)


def _problem_limits(p: Problem) -> list[str]:
    """Why the kernels cannot serve a problem, on any device; whole sentences."""
    limits = []
    if p.dtype.name == "float64":
        limits.append("Got float64, and the kernels compute in float32.")
    if max(p.head_dim, p.value_dim) > MAX_HEAD_DIM:
        limits.append(
            f"Got a head size of {max(p.head_dim, p.value_dim)}, and the kernels serve up to "
            f"{MAX_HEAD_DIM}."
        )
    for x in jax.tree.leaves((p.mask, p.scores)):
        # JAX goes over to indices of 64 bits at 2^32 bytes, which is late for bools.
        if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
            limits.append(
                f"Got an array of {x.dtype} with {x.size} elements, and in the kernels indices "
                "into arrays of one byte a number end at 2^31; a Predicate needs no array."
            )
    return limits


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


def _jax_limits() -> list[str]:
    """Why this JAX cannot run the kernels, on any device; whole sentences."""
    if _compat.has_triton():
        return []
    return [f"This JAX ({jax.__version__}) has no Triton language for Pallas."]


_warned: set[str] = set()


def warn_of_fallback(choice: Explanation, asked: str | None) -> None:
    """Says, once for each reason, that a call on an NVIDIA GPU is not served by the kernels.

    To be called by what the user calls: the warning points to the line of the user.
    """
    if asked is not None or choice.implementation == "triton" or not target().nvidia:
        return
    reason = choice.refused["triton"]
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f'pallas_flash.attention falls back to the slower "{choice.implementation}": {reason}',
            stacklevel=3,
        )


def tile_capability(implementation: str) -> Any:
    """The compute capability to choose tiles for: the interpreter uses those of the newest GPUs."""
    return target().capability if implementation == "triton" else None
