"""The measurements in docs/results, and how many times as fast "mosaic" is as "triton" by them."""

import functools
import json
import re

from test_structure import ROOT

RESULTS = ROOT / "docs" / "results"
SUSTAINED = "h200-2026-11-26-sustained.jsonl"
SUSTAINED_H100 = "h100-2026-11-26-sustained.jsonl"
OPTIONS = "h200-2026-11-24-options-sustained.jsonl"
HOPPER_FORWARD = "h200-2026-11-22-forward.jsonl"
HOPPER_BACKWARD = "h200-2026-11-22-backward.jsonl"
HOPPER_DBIAS = "h200-2026-11-22-dbias.jsonl"
HOPPER_CHOICE = "h200-2026-11-26-choice.jsonl"
HOPPER_VARIANTS = "h200-2026-11-26-variants.jsonl"


@functools.cache
def lines(name):
    """The objects of a file."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def times_of_options(direction):
    """Milliseconds of each who was timed, by size, option, length and whether it is causal."""
    times = {}
    for r in lines(OPTIONS):
        if r["pass"] == direction and "ms" in r:
            call = r["D"], r["option"], r["T"], r["causal"]
            times.setdefault(call, {})[r["peer"]] = r["ms"]["median"]
    return times


@functools.cache
def times_of_few_programs():
    """Milliseconds by the call, (pass, head size, kind, queries of all heads), and the peer."""
    return {
        (
            (r["case"], r["T"]),
            (r["pass"], r["D"], "causal" if r["causal"] else "full", r["B"] * r["T"] * r["N"]),
            r["peer"],
        ): r["ms"]["median"]
        for r in lines("h200-2026-11-26-few-programs.jsonl")
    }


# Of the names of calls in the results, what they are to the choice; other names have other shapes.
# Lengths are ranges of keys, too.
KIND_OF_CALL = {
    r"(full|causal)": r"\1",
    r"T3000 (causal)": r"\1",
    r"window ?\d+(, grouped)?|lengths( from half)?(, causal)?": "ranges",
    r"(lengths)( from half)?(, causal)?": r"\1",
    r"documents.*": "documents",
    r"(mask array|soft cap|sinks|dropout)(,? causal)?": r"\1",
    r"alibi,? causal": "slopes",
    r"(traced scale,|scale8) causal": "scale",
    r"bias (16 bits|full)": "bias in 16 bits",
    r"bias 32 bits": "bias",
    r"(score function|predicate|blocks)(?: causal)?": r"\1",
}


def gains(file, name, direction):
    """For head sizes and kinds of calls the lengths, and how much faster `name` was."""
    found, rows = {}, (row for row in lines(file) if row["pass"] == direction)
    for call, ms in {row["call"]: row["ms"] for row in rows if name in row["ms"]}.items():
        # T3000 stands before, T=2048 and T2048 behind.
        shape = re.fullmatch(r"(.+?) (64|128|256)(?: T=?(\d+))?", call)
        if shape is None:
            continue
        length = int(shape[3] or re.match(r"T(\d+)", call)[1])
        for pattern, kind in KIND_OF_CALL.items():
            if match := re.fullmatch(pattern, shape[1]):
                entry = found.setdefault((int(shape[2]), match.expand(kind)), {})
                gain = ms["triton"] / ms[name]
                entry[length] = min(gain, entry.get(length, gain))
    return found


# Names of options in its results; what a bias takes with its gradient has a table of its own.
KIND_OF_OPTION = {"bias": "bias in 16 bits", "ALiBi": "slopes", "trained bias": None}


def gains_of_options(direction):
    """As `gains`, of sustained times."""
    found = {}
    for (size, option, length, _), ms in times_of_options(direction).items():
        kind = KIND_OF_OPTION.get(option, option)
        if kind is not None:
            entry, gain = found.setdefault((size, kind), {}), ms["ours_triton"] / ms["ours_mosaic"]
            entry[length] = min(gain, entry.get(length, gain))
    return found


PASSES = {
    "forward": (HOPPER_FORWARD, "mosaic"),
    "backward": (HOPPER_BACKWARD, "mosaic"),
    "backward in order": (HOPPER_BACKWARD, "mosaic, reproducible"),
}


def all_gains(attention_pass):
    """As `gains`, of all files: where there are several times, the later ones count."""
    (file, name), direction = PASSES[attention_pass], attention_pass.split()[0]
    found = gains(file, name, direction)
    for later in (gains(HOPPER_CHOICE, name, direction), gains_of_options(attention_pass)):
        for key, gain in later.items():
            found[key] = found.get(key, {}) | gain
    return found
