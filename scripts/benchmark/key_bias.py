"""The figure of docs/key-bias.md: errors of dq, without and with a key bias."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# By the names of docs/results.
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
        wanted = r["case"], r["D"], r["dtype"], r["config"]["value_mean"]
        if wanted == ("causal", 128, "bfloat16", 0) and "dq_error" in r:
            points.setdefault(r["implementation"], []).append(
                (r["config"]["key_bias"], r["dq_error"])
            )
    return {name: sorted(points[name]) for name in LINES if name in points}


def about(records: Sequence[Mapping[str, Any]]) -> str:
    """Return what is written into the file, so that one can tell its data."""
    return json.dumps(shown(records))


def save(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Writes the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    errors = shown(records)
    for place, (name, points) in enumerate(errors.items()):
        for shift, (bias, error) in zip((-0.19, 0.19), points, strict=True):
            black = name == "ours_mosaic" and bias
            axes.barh(
                place + shift, error, 0.36, color="black" if black else "0.6" if bias else "0.85"
            )
            axes.text(error, place + shift, f" {error:.4f}, key bias {bias}", va="center", size=8)
    axes.set_yticks(range(len(errors)), [LINES[name] for name in errors])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlabel("relative error of dq; shorter is better")
    first = next(r for r in records if r["D"] == 128)
    axes.set_title(
        f"bfloat16, causal, head dim 128, {first['T']} tokens, {first['device']}",
        fontsize="medium",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Description": about(records)})
