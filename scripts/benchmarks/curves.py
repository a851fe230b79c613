"""One figure: causal speed over the length of the sequence, by pass and head dim."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from scripts.benchmarks.overview import COLORS, HEAD_DIMS, LIBRARIES, PASSES, Record, comparable
from scripts.benchmarks.shapes import short

Curve = dict[int, float]


def curves(records: Sequence[Record], of_pass: str, head_dim: int) -> dict[str, Curve]:
    """Return TFLOP/s by length, for each library."""
    wanted = f"{head_dim} causal", of_pass
    lines = [r for r in records if (r["case"], r["pass"]) == wanted and "ms" in r]
    best: dict[str, Curve] = {}
    for T in {r["T"] for r in lines}:
        by_name = comparable([r for r in lines if r["T"] == T])
        for library, names in LIBRARIES.items():
            if timed := [by_name[name] for name in names if name in by_name]:
                best.setdefault(library, {})[T] = max(timed)
    return {x: dict(sorted(best[x].items())) for x in LIBRARIES if x in best}


def about(records: Sequence[Record]) -> str:
    """Return what is written into the file, so that one can tell its data."""
    return json.dumps(
        {
            f"{of_pass} {head_dim}": {
                library: {T: round(x) for T, x in curve.items()}
                for library, curve in curves(records, of_pass, head_dim).items()
            }
            for of_pass in PASSES
            for head_dim in HEAD_DIMS
        }
    )


def save(records: Sequence[Record], path: pathlib.Path) -> None:
    """Write the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    grid = figure.subplots(len(PASSES), len(HEAD_DIMS), sharex=True, sharey=True)
    handles = {}
    for row, of_pass in zip(grid, PASSES, strict=True):
        for axes, head_dim in zip(row, HEAD_DIMS, strict=True):
            for library, curve in curves(records, of_pass, head_dim).items():
                (handles[library],) = axes.plot(
                    *zip(*curve.items(), strict=True), marker="o", color=COLORS[library]
                )
            axes.set_xscale("log", base=2)
            axes.set_title(f"{of_pass}, head dim {head_dim}", fontsize="medium", loc="left")
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylim(0, None)
    lengths = sorted(
        {T for d in HEAD_DIMS for c in curves(records, "forward", d).values() for T in c}
    )
    for axes in grid[-1]:
        axes.set_xticks(lengths, [short(T) for T in lengths])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    named = [x for x in LIBRARIES if x in handles]
    figure.legend(
        [handles[x] for x in named],
        named,
        loc="outside lower center",
        ncols=len(named),
        frameon=False,
    )
    first = next(r for r in records if r["case"] == f"{HEAD_DIMS[0]} causal")
    figure.suptitle(
        f"Causal attention, {first.get('dtype')}, {first['device']}, sustained; higher is better",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120, metadata={"Description": about(records)})
