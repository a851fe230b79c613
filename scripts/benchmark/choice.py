"""Finds in docs/results which passes of "mosaic" are faster than "triton"; as Python, too.

The tables in `pallas_flash/_faster.py` are `faster` and `fewer_rows`.
"""

from __future__ import annotations

import statistics
from typing import Any

from scripts.benchmark import report, results
from scripts.benchmark.results import RESULTS, time

HEAD_DIMS = (64, 128, 256)
# The least ratio of the times of "triton" and "mosaic" for which "mosaic" is chosen.
FASTER = 1.03
# Keys of all heads whose tiles of 128 fill at most half of an H200's SMs.
HALF_IDLE = 128 * (132 // 2)
# The names of options in tables.
KIND_OF_OPTION = {"bias": "bias in 16 bits", "float32 bias": "bias", "ALiBi": "slopes"}
KINDS = (
    *("full", "causal", "ranges", "documents", "lengths", "mask array", "bias in 16 bits"),
    *("soft cap", "slopes", "sinks", "scale", "dropout", "bias", "predicate", "score function"),
    "blocks",
)
PASSES = ("forward", "backward", "backward in order")
WITH_DBIAS = ("backward with dbias", "backward in order with dbias")


def kinds_of(r: dict[str, Any]) -> list[str]:
    """Return the kinds of a call in `pallas_flash._faster`; lengths are ranges of keys, too."""
    mask = "causal" if r["causal"] else "full"
    if r.get("lengths"):
        return ["ranges", "lengths"]
    if r.get("window") or r.get("documents"):
        return ["ranges" if r.get("window") else "documents"]
    option = r.get("option")
    return [KIND_OF_OPTION.get(option, option) if option else mask]


def pass_of(r: dict[str, Any]) -> str:
    """Return the pass, and whether its sums have an order."""
    return r["pass"] + " in order" * bool(r["config"].get("reproducible"))


def gains(*names: str) -> list[tuple[dict[str, Any], float]]:
    """Return lines of "mosaic", and its speed relative to "triton" in the same run."""

    def run(r):
        return r["shape"], r["pass"], r["commit"], r["date"]

    lines = [r for name in names for r in results.load(RESULTS / f"{name}.jsonl") if "ms" in r]
    triton = {run(r): time(r) for r in lines if r["implementation"] == "ours_triton"}
    found = {}
    for r in lines:
        if r["implementation"] == "ours_mosaic" and run(r) in triton:
            found[report.key(r)] = r, triton[run(r)] / time(r)
    return list(found.values())


def by_length() -> dict[tuple[str, str, int], dict[int, float]]:
    """Return the least gain by length, of each pass, kind and head dim."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}

    def add(attention_pass, kind, r, gain):
        entry = found.setdefault((attention_pass, kind, r["D"]), {})
        entry[r["T"]] = min(gain, entry.get(r["T"], gain))

    lines = gains("h200-choice") + [x for x in gains("h200-options") if x[0]["option"]]
    for r, gain in lines:
        # Other head dims follow these; times with a bias of all pairs decide nothing.
        if r.get("V") or r["D"] not in HEAD_DIMS or r.get("bias_axes") == "B, N, T, S":
            continue
        if "bias_axes" in r and r["option"] == "trained bias":
            add(f"{pass_of(r)} with dbias", "causal" if r["causal"] else "full", r, gain)
        elif r["option"] != "trained bias" and "bias_axes" not in r:
            for kind in kinds_of(r):
                add(pass_of(r), kind, r, gain)
    fastest: dict[str, tuple[dict[str, Any], float]] = {}
    for r, gain in gains("h200-shared-queries"):
        if r["N"] * r["T"] <= HALF_IDLE and gain > fastest.get(r["shape"], (r, 0))[1]:
            fastest[r["shape"]] = r, gain
    for r, gain in fastest.values():
        add("backward of few programs", kinds_of(r)[0], r, gain)
    return found


def since(gains: dict[int, float]) -> int | None:
    """Return the length from which on it is faster, if there is one."""
    slower = max((length for length, gain in gains.items() if gain < FASTER), default=0)
    return min((length for length in gains if length > slower), default=None)


def faster() -> str:
    """Return, as Python, the length from which on each pass of "mosaic" is faster."""
    table: dict[str, dict[str, dict[int, int]]] = {}
    for (attention_pass, kind, D), gain in by_length().items():
        if (length := since(gain)) is not None:
            table.setdefault(attention_pass, {}).setdefault(kind, {})[D] = length
            if attention_pass in WITH_DBIAS:
                bias = table[attention_pass].setdefault("bias in 16 bits", {})
                bias[D] = min(length, bias.get(D, length))
    lines = ["FASTER_BY_MOSAIC = {"]
    for attention_pass in (*PASSES[:2], "backward of few programs", PASSES[2], *WITH_DBIAS):
        lines.append(f'    "{attention_pass}": {{')
        for kind in sorted(table[attention_pass], key=KINDS.index):
            lines.append(f'        "{kind}": {dict(sorted(table[attention_pass][kind].items()))},')
        lines.append("    },")
    return "\n".join([*lines, "}"])


def fewer_rows() -> str:
    """Return, as Python, the queries of all heads from which on each pass is faster."""
    found: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    for r, gain in gains("h200-small-calls"):
        rows = r["B"] * r["T"] * r["N"]
        # The table above has the backward at low occupancy.
        if r["pass"] == "forward" or rows > HALF_IDLE or r["N"] != r["K"]:
            key = r["pass"], r["D"], "causal" if r["causal"] else "full"
            found.setdefault(key, {}).setdefault(rows, []).append(gain)
    lines = ["FEWER_ROWS_MEASURED = {"]
    for key, entry in sorted(found.items(), key=lambda x: (x[0][0] != "forward", x[0][1:])):
        rows = since({n: statistics.geometric_mean(x) for n, x in entry.items()})
        if rows is not None:
            lines.append(f'    ("{key[0]}", {key[1]}, "{key[2]}"): {rows},')
    return "\n".join([*lines, "}"])
