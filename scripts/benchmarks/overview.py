"""One figure: causal speed by head dim, forward and backward, each at its longest sequence."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks.shapes import short

HEAD_DIMS = (64, 128, 256)
PASSES = ("forward", "backward")
# A library's bar shows the fastest of its implementations.
LIBRARIES = {
    "pallas_flash": ("ours",),
    "FlashAttention-3": ("flash_attention_3",),
    "cuDNN": ("jax_cudnn", "torch_cudnn"),
    "tokamax": ("tokamax_mosaic", "tokamax_triton"),
}
COLORS = {
    "pallas_flash": "black",
    "FlashAttention-3": "#009e73",
    "cuDNN": "#e69f00",
    "tokamax": "#56b4e9",
}
Record = Mapping[str, Any]


def longest(records: Sequence[Record], of_pass: str, head_dim: int) -> list[Record]:
    """Return the timed lines of a pass and a head dim at the longest sequence."""
    wanted = f"{head_dim} causal", of_pass
    here = [r for r in records if (r["case"], r["pass"]) == wanted and "ms" in r]
    return [r for r in here if r["T"] == max(x["T"] for x in here)]


def comparable(lines: Sequence[Record]) -> dict[str, float]:
    """Return TFLOP/s by implementation, of lines of one shape; none without a time of ours.

    Peers were timed on different days. The ratio of a peer is of times in turns with ours, so that
    our speed by this ratio can be compared, where the peer's own time may be 3 % off.
    """
    tflops = {r["implementation"]: r["tflops"] for r in lines}
    if "ours" not in tflops:
        return {}
    ratios = {r["implementation"]: r["ratio"]["median"] for r in lines if "ratio" in r}
    return tflops | {name: tflops["ours"] / ratio for name, ratio in ratios.items()}


def speeds(records: Sequence[Record], of_pass: str, head_dim: int) -> dict[str, float]:
    """Return TFLOP/s of each library that was timed; none without a time of ours."""
    by_name = comparable(longest(records, of_pass, head_dim))
    return {
        library: max(by_name[name] for name in names if name in by_name)
        for library, names in LIBRARIES.items()
        if by_name.keys() & set(names)
    }


def gains(records: Sequence[Record], of_pass: str, head_dim: int) -> dict[str, float]:
    """Return how many times as fast ours is as each library, measured in turns with it."""
    ratios = {
        r["implementation"]: r["ratio"]["median"]
        for r in longest(records, of_pass, head_dim)
        if "ratio" in r
    }
    return {
        library: min(ratios[name] for name in names if name in ratios)
        for library, names in LIBRARIES.items()
        if ratios.keys() & set(names)
    }


def shown(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return what the bars say, by pass and head dim."""
    bars = {}
    for of_pass in PASSES:
        for head_dim in HEAD_DIMS:
            ratios = gains(records, of_pass, head_dim)
            bars[f"{of_pass} {head_dim}"] = {
                library: f"{speed:.0f}, {ratios.get(library, math.nan):.2f}"
                for library, speed in speeds(records, of_pass, head_dim).items()
            }
    return {bar: said for bar, said in bars.items() if said}


def about(records: Sequence[Record]) -> str:
    """Return what is written into the file, so that one can tell its data."""
    return json.dumps(shown(records))


def save(records: Sequence[Record], path: pathlib.Path) -> bool:
    """Write the figure, unless there is nothing to show."""
    if not shown(records):
        return False
    draw(records).savefig(path, dpi=120, metadata={"Description": about(records)})
    return True


def draw(records: Sequence[Record]):
    """Return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, len(PASSES), sharey=True)
    for axes, of_pass in zip(panels, PASSES, strict=True):
        for group, head_dim in enumerate(HEAD_DIMS):
            tflops, ratios = speeds(records, of_pass, head_dim), gains(records, of_pass, head_dim)
            width = 0.85 / len(LIBRARIES)
            for place, (library, speed) in enumerate(tflops.items()):
                x = group + (place - (len(tflops) - 1) / 2) * width
                axes.bar(x, speed, width * 0.92, color=COLORS[library], label=library)
                ratio = ratios.get(library, math.nan)
                text = (
                    f"{speed:.0f}"
                    if library == "pallas_flash"
                    else f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
                )
                axes.text(x, speed, text, ha="center", va="bottom", size=8)
        axes.set_xticks(range(len(HEAD_DIMS)), [f"head dim {x}" for x in HEAD_DIMS])
        axes.set_title(of_pass, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("TFLOP/s")
    handles, labels = panels[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        [named[x] for x in LIBRARIES if x in named],
        [x for x in LIBRARIES if x in named],
        loc="outside lower center",
        ncols=len(LIBRARIES),
        frameon=False,
    )
    first = next(r for d in HEAD_DIMS for r in longest(records, PASSES[0], d))
    figure.suptitle(
        f"Causal attention, {first.get('dtype')}, {short(first['T'])} tokens, {first['device']}. "
        "Above a bar: how many times as fast pallas_flash is",
        fontsize="medium",
    )
    return figure
