"""One figure: six panels, forward and backward by head size, causal, each at its longest text."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmark.shapes import short

HEAD_SIZES = (64, 128, 256)
# Who is behind a bar, each by the fastest of its ways; all others are the rest.
GROUPS = {
    "pallas_flash": {"ours": ""},
    "cuDNN": {"jax_cudnn": "JAX", "torch_cudnn": "PyTorch"},
    "tokamax": {"tokamax_triton": "Triton", "tokamax_mosaic": "Mosaic"},
    "best of the rest": {
        "jax_mha": "JAX, Triton",
        "jax_mosaic": "JAX, Mosaic",
        "triton_tutorial": "Triton tutorial",
        "torch_flash": "PyTorch flash",
        "torch_flex": "PyTorch flex",
    },
}


def of_panel(records: Sequence[Mapping[str, Any]], direction: str, D: int) -> list:
    """The times of a pass and a head size at the longest text."""
    wanted = f"{D} causal", direction
    here = [r for r in records if (r["case"], r["pass"]) == wanted and "ms" in r]
    return [r for r in here if r["T"] == max(x["T"] for x in here)]


def bars(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, tuple]]:
    """(TFLOP/s, which way) of each group that was timed, for each panel: (pass, head size)."""
    panels = {}
    for direction in ("forward", "backward"):
        for D in HEAD_SIZES:
            speed = {r["implementation"]: r["tflops"] for r in of_panel(records, direction, D)}
            fastest = {
                group: max((speed[peer], way) for peer, way in ways.items() if peer in speed)
                for group, ways in GROUPS.items()
                if speed.keys() & ways
            }
            if "pallas_flash" in fastest:
                panels[direction, D] = fastest
    return panels


def shown(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what the bars say, by panel."""
    return {
        f"{direction} {D}": {group: f"{x:.0f} {way}".rstrip() for group, (x, way) in panel.items()}
        for (direction, D), panel in bars(records).items()
    }


def about(records: Sequence[Mapping[str, Any]]) -> str:
    """Return what is written into the file, so that one can tell its data."""
    return json.dumps(shown(records))


def save(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> bool:
    """Writes the figure, unless there is nothing to show."""
    if not bars(records):
        return False
    draw(records).savefig(path, dpi=120, metadata={"Description": about(records)})
    return True


def draw(records: Sequence[Mapping[str, Any]]):
    """The figure."""
    from matplotlib.figure import Figure

    panels = bars(records)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    grid = figure.subplots(2, len(HEAD_SIZES), sharex=True, squeeze=False)
    for row, direction in zip(grid, ("forward", "backward"), strict=True):
        for axes, D in zip(row, HEAD_SIZES, strict=True):
            fastest = panels.get((direction, D), {})
            for place, group in enumerate(GROUPS):
                if group not in fastest:
                    axes.text(10, place, "not timed", va="center", size=8, color="0.5")
                    continue
                speed, way = fastest[group]
                axes.barh(place, speed, color="black" if place == 0 else "0.75")
                text = f"{speed:.0f}" + (f"  {way}" if way else "")
                axes.text(
                    10, place, text, va="center", size=8, color="white" if place == 0 else "black"
                )
            axes.set_yticks(range(len(GROUPS)), GROUPS if HEAD_SIZES[0] == D else [])
            axes.set_ylim(len(GROUPS) - 0.5, -0.5)
            title = f"{direction}, head size {D}"
            if here := of_panel(records, direction, D):
                title += f", T = {short(here[0]['T'])}"
            axes.set_title(title, fontsize="medium", loc="left")
            axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("TFLOP/s")
    first, *_ = of_panel(records, *next(iter(panels)))
    figure.suptitle(
        f"Causal attention, {first.get('dtype')}, {first['device']}, {first['date'][:10]}; longer "
        "is faster",
        fontsize="medium",
    )
    return figure
