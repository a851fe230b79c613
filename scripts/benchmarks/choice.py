"""Finds in docs/results how many times as fast as "triton" the passes of "mosaic" are.

The rules in `pallas_flash/_selection/preferences.py` are made by these: times of an H200, and of an
H100 where kernels have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.benchmarks import report, results
from scripts.benchmarks.results import RESULTS, time

HEAD_DIMS = (64, 128, 256)
# Keys of all heads whose tiles of 128 fill at most half of an H200's SMs.
HALF_IDLE = 128 * (132 // 2)
# The names of options in tables.
KIND_OF_OPTION = {"bias": "bias in 16 bits", "float32 bias": "bias", "ALiBi": "slopes"}
KINDS = (
    *("full", "causal", "ranges", "documents", "lengths", "mask array", "bias in 16 bits"),
    *("soft cap", "slopes", "sinks", "scale", "dropout", "bias", "predicate", "score function"),
    *("blocks", "another mask"),
)
PASSES = ("forward", "backward", "backward in order")
# Where both have a call, the line in the later one counts.
FILES = ("h200-choice", "h100-choice")
# Calls of fewer tokens in all sequences were timed for single rules, and are not in tables.
FEWEST_TOKENS = 15_000


def kinds_of(r: dict[str, Any]) -> list[str]:
    """Return the kinds of a call in `_selection.preferences`; lengths are ranges of keys, too."""
    mask = "causal" if r["causal"] else "full"
    if r.get("lengths"):
        return ["ranges", "lengths"]
    if r.get("window") or r.get("documents"):
        return ["ranges" if r.get("window") else "documents"]
    option: str | None = r.get("option")
    return [KIND_OF_OPTION.get(option, option) if option else mask]


def pass_of(r: dict[str, Any]) -> str:
    """Return the pass, and whether its sums have an order."""
    return r["pass"] + " in order" * bool(r["config"].get("reproducible"))


def gains(*names: str) -> list[tuple[dict[str, Any], float]]:
    """Return lines of "mosaic" in files, and its speed relative to "triton" in the same run."""

    def run(r):
        return r["shape"], r["pass"], r["commit"], r["date"]

    lines = [r for name in names for r in results.load(RESULTS / f"{name}.jsonl") if "ms" in r]
    others = {run(r): time(r) for r in lines if r["implementation"] == "ours_triton"}
    pairs = {}
    for r in lines:
        if r["implementation"] == "ours_mosaic" and run(r) in others:
            pairs[report.key(r)] = r, others[run(r)] / time(r)
    return list(pairs.values())


def measured() -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield each pass that was timed by both: its name, its line of "mosaic", and the gain."""
    lines = gains(*FILES) + [x for x in gains("h200-options") if x[0]["option"]]
    for r, gain in lines:
        # Other head dims follow these; times with a bias of all pairs decide nothing.
        if r.get("V") or r["D"] not in HEAD_DIMS or r.get("bias_axes") == "B, N, T, S":
            continue
        trained = r["option"] == "trained bias"
        if trained == ("bias_axes" in r):
            yield pass_of(r) + " with dbias" * trained, r, gain
    fastest: dict[str, tuple[dict[str, Any], float]] = {}
    for r, gain in gains("h200-shared-queries"):
        if r["N"] * r["T"] <= HALF_IDLE and gain > fastest.get(r["shape"], (r, 0))[1]:
            fastest[r["shape"]] = r, gain
    for r, gain in fastest.values():
        yield "backward of few programs", r, gain


def gains_by_length() -> dict[tuple[str, str, int], dict[int, float]]:
    """Return the least gain by length, of each pass, kind and head dim."""
    by_length: dict[tuple[str, str, int], dict[int, float]] = {}
    for attention_pass, r, gain in measured():
        if r["B"] * r["T"] < FEWEST_TOKENS:
            continue
        mask = "causal" if r["causal"] else "full"
        for kind in [mask] if r.get("option") == "trained bias" else kinds_of(r):
            entry = by_length.setdefault((attention_pass, kind, r["D"]), {})
            entry[r["T"]] = min(gain, entry.get(r["T"], gain))
    return by_length
