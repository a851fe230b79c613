"""Rotary positions, with the rules that scale them for longer texts."""

import dataclasses
import math
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def is_number(x: Any) -> TypeGuard[int | float]:
    """Whether a value of a file is a number that a float has."""
    return type(x) in (int, float) and abs(x) < 1e300


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: pair i of H/2 turns by `position * frequencies(H)[i]`.

    Attributes:
        theta: Base of the frequencies.
        kind: Rule that scales them for longer texts: default (none), linear, llama3 or yarn.
        factor: Ratio of the longer to the original context.
        original: Original context, in tokens; for llama3 and yarn.
        low: llama3 scales frequencies with fewer turns in the original context fully.
        high: llama3 keeps frequencies with more turns as they are.
        slow: yarn scales frequencies with fewer turns fully.
        fast: yarn keeps frequencies with more turns as they are.
        truncate: Whether yarn rounds the numbers of the two pairs between which it interpolates.
        amplitude: Multiplies queries and keys.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    amplitude: float = 1.0

    def __call__(
        self, x: Float[Array, "*batch T N H"], positions: Int[Array, "*#batch T"]
    ) -> Float[Array, "*batch T N H"]:
        """Turn the pairs (i, i + H/2) of each head, as `pallas_flash.flax.apply_rope` does."""
        angles = positions[..., None, None].astype(jnp.float32)
        angles = angles * jnp.expand_dims(self.frequencies(x.shape[-1]), range(angles.ndim - 1))
        cos, sin = self.amplitude * jnp.cos(angles), self.amplitude * jnp.sin(angles)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        low, high = jnp.split(wide, 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle of each of the head_dim / 2 pairs for one position, in float32."""
        half = head_dim // 2
        f = self.theta ** (-np.arange(half) / half)
        if self.kind == "linear":
            f = f / self.factor
        elif self.kind == "llama3":
            turns = self.original * f / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            f = kept * f + (1 - kept) * f / self.factor
        elif self.kind == "yarn":
            # https://arxiv.org/abs/2309.00071, section 3.2
            first, last = (self._pair_with(turns, half) for turns in (self.fast, self.slow))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
            f = kept * f + (1 - kept) * f / self.factor
        return f.astype(np.float32)

    def _pair_with(self, turns: float, half: int) -> float:
        """Return the number of the pair that makes `turns` turns in the original context."""
        return half * math.log(self.original / (2 * math.pi * turns)) / math.log(self.theta)

    @classmethod
    def from_json(cls, fields: dict[str, Any], context: int) -> "Rope":
        """Return the rotary positions of `rope_theta` and the fields of `rope_scaling`.

        Raises:
            ValueError: The rule is unknown, has an unknown field or number, or lacks a field.
        """
        left = {name: x for name, x in fields.items() if x is not None}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        if not isinstance(kind, str) or kind not in ROPE_FIELDS:
            raise ValueError(
                f"`rope_scaling` must have one of the types {', '.join(ROPE_FIELDS)}; got {kind!r}."
            )
        for name in ROPE_NO_EFFECT.get(kind, ()):
            left.pop(name, None)
        for name, x in left.items():
            wanted = "a bool" if name == "truncate" else "a number"
            if not (isinstance(x, bool) if name == "truncate" else is_number(x)):
                raise ValueError(f"`{name}` of rotary positions must be {wanted}; got {x!r}.")
            # The interpolation of yarn divides by the logarithm of its base.
            least = 1 if (kind, name) == ("yarn", "rope_theta") else 0
            if name not in ("truncate", "mscale", "mscale_all_dim") and x <= least:
                raise ValueError(f"`{name}` of rotary positions must be above {least}; got {x}.")
        if left.pop("partial_rotary_factor", 1) != 1:
            raise ValueError(
                "`partial_rotary_factor` must be 1, because `Decoder` turns all of a head; got "
                f"{fields['partial_rotary_factor']}."
            )
        names = {"rope_theta": "theta"} | ROPE_FIELDS[kind]
        values = {ours: left.pop(name) for name, ours in names.items() if name in left}
        needed = {"linear": {"factor"}, "yarn": {"factor"}, "llama3": set(names.values())}
        if missing := sorted(needed.get(kind, set()) - values.keys()):
            raise ValueError(
                f"`rope_scaling` of type {kind} must give {', '.join(missing)}; got {fields}."
            )
        if kind == "llama3" and values["low"] >= values["high"]:
            raise ValueError(
                "`low_freq_factor` of rotary positions must be below `high_freq_factor`; got "
                f"{values['low']} and {values['high']}."
            )
        if kind == "yarn":
            values["amplitude"] = _yarn_amplitude(values["factor"], left, values)
            values.setdefault("original", context)
        if left:
            raise ValueError(
                f"`rope_scaling` of type {kind} must have the fields {', '.join(names)} alone; got "
                f"{', '.join(map(repr, left))}."
            )
        return cls(kind=kind, **values)


# Fields of the rules that other libraries write and do not read.
ROPE_NO_EFFECT = {"linear": ["original_max_position_embeddings"], "yarn": ["finetuned"]}
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "beta_slow": "slow",
        "beta_fast": "fast",
        "truncate": "truncate",
        "attention_factor": "amplitude",
    },
}


def _yarn_amplitude(factor: float, left: dict[str, Any], values: dict[str, Any]) -> float:
    """Return the amplitude that yarn's fields give or that its paper recommends."""

    def recommended(scale):
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scales = [left.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if "amplitude" in values:
        return values["amplitude"]
    if all(scales):
        return recommended(scales[0]) / recommended(scales[1])
    return recommended(1)
