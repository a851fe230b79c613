"""The figure of docs/key-bias.md: errors of dq over the size of the key bias."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Keys are names of docs/results.
LINES = {
    "ours_mosaic": "pallas_flash",
    "jax_xla": "dense attention (jax.nn)",
    "jax_cudnn": "cuDNN",
    "flash_attention_3": "FlashAttention-3",
}


def shown(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return bias and error of each implementation, causal at head dim 128."""
    points: dict[str, list[tuple[int, float]]] = {}
    for r in records:
        inputs = dict(r["config"])
        bias = inputs.pop("key_bias")
        plain = not any(inputs.values()) and r.get("result") == "dq"
        if plain and (r["case"], r["D"], r["dtype"]) == ("causal", 128, "bfloat16"):
            points.setdefault(r["implementation"], []).append((bias, r["error"]))
    return {name: sorted(points[name]) for name in LINES if name in points}


def about(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the metadata of the file, which names its data."""
    return json.dumps(shown(records))


def save(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Write the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, points in shown(records).items():
        label = LINES[name]
        ours = name == "ours_mosaic"
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            color="black" if ours else None,
            label=label,
        )
    # Zero has no logarithm: the axis is linear up to the smallest bias.
    axes.set_xscale("symlog", linthresh=2)
    axes.set_yscale("log")
    ticks = 0.003, 0.01, 0.03, 0.1
    axes.set_yticks(ticks, [str(x) for x in ticks])
    axes.yaxis.set_minor_formatter("")
    biases = sorted({bias for points in shown(records).values() for bias, _ in points})
    axes.set_xticks(biases, [str(bias) for bias in biases])
    axes.set_xlabel("key bias in two features; keys have deviation 1")
    axes.set_ylabel("relative error of dq")
    axes.legend(frameon=False, fontsize="small")
    first = next(r for r in records if r["D"] == 128)
    axes.set_title(
        f"bfloat16, causal, head dim 128, {first['T']} tokens, {first['device']}; lower is better",
        fontsize="medium",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Description": about(records)})
