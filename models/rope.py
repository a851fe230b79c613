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
    """Rotary positions: pair i of H/2 turns by `position * frequencies(H, room)[i]`.

    With `share` below 1, H is the part of a head that turns, which comes first.

    Attributes:
        theta: Base of the frequencies.
        kind: Rule that scales them for longer texts: default (none), linear, llama3, yarn or
            longrope.
        factor: Ratio of the longer to the original context.
        original: Original context, in tokens; for llama3, yarn and longrope.
        low: llama3 scales frequencies with fewer turns in the original context fully.
        high: llama3 keeps frequencies with more turns as they are.
        slow: yarn scales frequencies with fewer turns fully.
        fast: yarn keeps frequencies with more turns as they are.
        truncate: Whether yarn rounds the numbers of the two pairs between which it interpolates.
        amplitude: Multiplies queries and keys.
        short: For longrope, the divisor of each frequency in a room of at most `original` tokens.
        long: The same in a longer room.
        room: Tokens of the cache that keeps what is turned; 0 without a cache, where the room is
            the length of the call's texts.
        share: The part of each head that turns.
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
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    room: int = 0
    share: float = 1.0

    def __call__(
        self, x: Float[Array, "*batch T N H"], positions: Int[Array, "*#batch T"]
    ) -> Float[Array, "*batch T N H"]:
        """Turn the pairs (i, i + H/2) of each head, as `pallas_flash.flax.apply_rope` does."""
        if not (turned := self.turned(x.shape[-1])):
            return x
        room = self.room or positions.shape[-1]
        angles = positions[..., None, None].astype(jnp.float32)
        angles = angles * jnp.expand_dims(self.frequencies(turned, room), range(angles.ndim - 1))
        cos, sin = self.amplitude * jnp.cos(angles), self.amplitude * jnp.sin(angles)
        wide = x[..., :turned].astype(jnp.promote_types(x.dtype, jnp.float32))
        low, high = jnp.split(wide, 2, axis=-1)
        wide = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
        return jnp.concatenate([wide.astype(x.dtype), x[..., turned:]], axis=-1)

    def turned(self, head_dim: int) -> int:
        """Return the number of features of a head that turn."""
        return int(head_dim * self.share)

    def check(self, head_dim: int) -> None:
        """Raise unless heads of this size can turn.

        Raises:
            ValueError: They cannot.
        """
        size = self.turned(head_dim)
        if size % 2:
            part = f", of which {size} turn" if self.share < 1 else ""
            raise ValueError(f"`head_dim` must be even for rotary positions; got {head_dim}{part}.")
        for name, factors in (("short_factor", self.short), ("long_factor", self.long)):
            if self.kind == "longrope" and len(factors) != size // 2:
                raise ValueError(
                    f"`{name}` of rotary positions must have {size // 2} numbers, one for each "
                    f"pair of a head; got {len(factors)}."
                )

    def frequencies(self, head_dim: int, room: int = 1) -> np.ndarray:
        """Return the angle of each pair for one position, in float32.

        Args:
            head_dim: Number of features that turn, of which two are a pair.
            room: Most tokens of a text, by which longrope chooses.
        """
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
        elif self.kind == "longrope":
            # https://arxiv.org/abs/2402.13753
            f = f / np.array(self.long if room > self.original else self.short)
        return f.astype(np.float32)

    def _pair_with(self, turns: float, half: int) -> float:
        """Return the number of the pair that makes `turns` turns in the original context."""
        return half * math.log(self.original / (2 * math.pi * turns)) / math.log(self.theta)

    @classmethod
    def from_json(cls, fields: dict[str, Any], context: int, original: int | None = None) -> "Rope":
        """Return the rotary positions of `rope_theta` and the fields of `rope_scaling`.

        Args:
            fields: These, in one object.
            context: Longest text.
            original: The original context, where it stands beside these fields (Phi-3).

        Raises:
            ValueError: The rule is unknown, has an unknown field or number, or lacks a field.
        """
        left = {name: x for name, x in fields.items() if x is not None}
        kind = left.pop("rope_type", left.pop("type", "default"))
        left.pop("type", None)
        # The name of longrope in the first files of Phi-3.
        kind = "longrope" if kind == "su" else kind
        if not isinstance(kind, str) or kind not in ROPE_FIELDS:
            raise ValueError(
                f"`rope_scaling` must have one of the types {', '.join(ROPE_FIELDS)}; got {kind!r}."
            )
        for name in ROPE_NO_EFFECT.get(kind, ()):
            left.pop(name, None)
        for name, x in left.items():
            if name in ("short_factor", "long_factor"):
                if not isinstance(x, list) or not all(is_number(y) and y > 0 for y in x):
                    raise ValueError(
                        f"`{name}` of rotary positions must be numbers above 0; got {x!r:.60}."
                    )
                left[name] = tuple(x)
                continue
            wanted = "a bool" if name == "truncate" else "a number"
            if not (isinstance(x, bool) if name == "truncate" else is_number(x)):
                raise ValueError(f"`{name}` of rotary positions must be {wanted}; got {x!r}.")
            # The interpolation of yarn divides by the logarithm of its base.
            least = 1 if (kind, name) == ("yarn", "rope_theta") else 0
            if name not in ("truncate", "mscale", "mscale_all_dim") and x <= least:
                raise ValueError(f"`{name}` of rotary positions must be above {least}; got {x}.")
        names = {"rope_theta": "theta", "partial_rotary_factor": "share"} | ROPE_FIELDS[kind]
        values = {ours: left.pop(name) for name, ours in names.items() if name in left}
        if values.get("share", 0) > 1:
            raise ValueError(f"`partial_rotary_factor` must be at most 1; got {values['share']}.")
        needed = ROPE_NEEDED.get(kind, set()) - values.keys()
        if missing := [name for name, ours in names.items() if ours in needed]:
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
        elif kind == "longrope":
            values |= _longrope(values, context, original)
        if left:
            raise ValueError(
                f"`rope_scaling` of type {kind} must have the fields {', '.join(names)} alone; got "
                f"{', '.join(map(repr, left))}."
            )
        return cls(kind=kind, **values)


# Fields of the rules that other libraries write and do not read.
ROPE_NO_EFFECT = {"linear": ["original_max_position_embeddings"], "yarn": ["finetuned"]}
ROPE_NEEDED = {
    "linear": {"factor"},
    "yarn": {"factor"},
    "llama3": {"factor", "original", "low", "high"},
    "longrope": {"short", "long"},
}
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
    "longrope": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "short_factor": "short",
        "long_factor": "long",
        "attention_factor": "amplitude",
    },
}


def _longrope(values: dict[str, Any], context: int, original: int | None) -> dict[str, Any]:
    """Return the numbers of longrope that other fields give, or that its paper recommends."""
    if original is None or original < 2:
        raise ValueError(
            "`rope_scaling` of type longrope must have an `original_max_position_embeddings` above "
            f"1 beside it; got {original}."
        )
    factor = context / original
    for name, x in (("factor", factor), ("original", original)):
        # Libraries differ in which of two they take.
        if values.get(name, x) != x:
            raise ValueError(
                f"`{name}` of longrope must be {x}, which `max_position_embeddings` and "
                f"`original_max_position_embeddings` give; got {values[name]}."
            )
    recommended = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    amplitude = values.get("amplitude", recommended)
    return {"factor": factor, "original": original, "amplitude": amplitude}


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
