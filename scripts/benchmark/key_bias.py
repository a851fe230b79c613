"""The figure of docs/key-bias.md: the error of dq by the bias of keys, of each implementation."""

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

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, points in shown(records).items():
        ours = name == "ours_mosaic"
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=LINES[name],
            linewidth=2.5 if ours else 1.2,
            color="black" if ours else None,
        )
    axes.set_xscale("symlog", linthresh=2)
    biases = sorted({bias for points in shown(records).values() for bias, _ in points})
    axes.set_xticks(biases, map(str, biases))
    axes.set_yscale("log")
    axes.set_xlabel("bias of keys in 2 of 128 features, where their deviation is 1")
    axes.set_ylabel("relative error of dq")
    axes.set_title(
        f"bfloat16, causal, {records[0]['T']} tokens, {records[0]['device']}; lower is better",
        fontsize="medium",
        loc="left",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Description": about(records)})
