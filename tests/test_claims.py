"""Figures in the documents are those of the result files: sentences and tables are made again here.

After a new measurement this says which sentences are no longer true, and what would be.
"""

import contextlib
import functools
import io
import json
import math
import re
import shlex
import statistics

import claims_of_steps as of_steps
import pytest
from claims_of_steps import PERFORMANCE, by_turns
from results import (
    PASSES,
    RESULTS,
    SUSTAINED,
    SUSTAINED_H100,
    all_gains,
    lines,
    times_of_few_programs,
    times_of_options,
)
from test_structure import ROOT

from scripts import bench_attention
from scripts.benchmark import overview

README, DOCS = ROOT / "README.md", ROOT / "docs"
EVIDENCE = DOCS / "evidence.md"
SPEED = "h200-2026-11-21.jsonl"

DENSE = [f"{D} {mask}" for D in (64, 128, 256) for mask in ("causal", "full")]
SHORT = ["short 128 causal", "short 64 causal"]
FEW_PROGRAMS = ["gqa one example", "gqa 8 of 64 heads"]


@functools.cache
def records():
    """The measurements that count: a later one replaces an earlier one of the same."""
    bursts = [r for r in lines(SPEED) if "sustained" not in r]
    return list({(r["shape"], r["pass"], r["peer"]): r for r in bursts}.values())


def found(**wanted):
    """The records with these values; `direction` is their pass."""
    wanted = {{"direction": "pass"}.get(key, key): value for key, value in wanted.items()}
    return [r for r in records() if "ms" in r and all(r[k] == x for k, x in wanted.items())]


def ratios(direction, case, peer):
    """How many times as fast ours is, by length."""
    return {r["S"]: r["ratio"]["median"] for r in found(direction=direction, case=case, peer=peer)}


def mean(direction, case, peer):
    """The number in the table."""
    return statistics.geometric_mean(ratios(direction, case, peer).values())


def means(peer, *cases, directions=("forward", "backward")):
    """Those of the cases that a peer was timed in."""
    return [
        mean(direction, case, peer)
        for direction in directions
        for case in cases
        if ratios(direction, case, peer)
    ]


def span(values, unit=" %"):
    """\"73 to 87 %\", of values below 1."""
    low, high = (f"{100 * x:.0f}" for x in (min(values), max(values)))
    return f"{low} to {high}{unit}" if low != high else f"{low}{unit}"


def is_level(ratio):
    return abs(ratio - 1) <= 0.03


def ms(direction, case, S, peer="ours"):
    (record,) = found(direction=direction, case=case, S=S, peer=peer)
    return record["ms"]["median"]


# ------------------------------------------------------------------------------------------------
# Sentences. Each function yields (document, sentence), and asserts what has no number.


def of_cudnn():
    wide, narrow = DENSE[2:], DENSE[:2]
    yield (
        README,
        f"Through Triton, which serves other GPUs and all else, an H200 has "
        f"{span(means('jax_cudnn', *wide))} of cuDNN's speed at head sizes 128 and 256, and "
        f"{span(means('jax_cudnn', *narrow))} at 64",
    )
    yield (
        PERFORMANCE,
        f"With full and causal masks ours has {span(means('jax_cudnn', *wide))} of its speed at "
        f"head sizes 128 and 256, and {span(means('jax_cudnn', *narrow))} at 64; with grouped "
        f"heads at 128 {span(means('jax_cudnn', 'gqa 128 causal'))}; in calls of up to 1024 "
        f"tokens {span(means('jax_cudnn', SHORT[0]))} at 128 and "
        f"{span(means('jax_cudnn', SHORT[1]))} at 64",
    )
    few = [
        ratio
        for direction in ("forward", "backward")
        for case in FEW_PROGRAMS
        for ratio in ratios(direction, case, "jax_cudnn").values()
    ]
    window = mean("forward", "window 1024 gqa 64", "jax_cudnn")
    queries = mean("forward", "512 queries gqa 8 of 64 heads", "jax_cudnn")
    assert is_level(mean("forward", "decode gqa 128", "jax_cudnn"))
    assert is_level(mean("backward", "window 1024 gqa 64", "jax_cudnn"))
    yield (
        PERFORMANCE,
        f"where programs are few {span(few)}. Level are decoding and the backward with a window. "
        f"Ours is ahead by {100 * window - 100:.0f} % forward with a window, and {queries:.1f} "
        "times as fast with 512 queries on 32768 keys.",
    )


def sustained(direction, *cases, peer="jax_cudnn", T=None, file=SUSTAINED):
    """How many times as fast ours is, at each length of the cases, or at this one."""
    return [
        r["ratio"]["median"]
        for r in lines(file)
        if (r["pass"], r["peer"]) == (direction, peer) and r["case"] in cases and "ratio" in r
        if T in (None, r["T"])
    ]


# Calls of a kind, as the goals are set: passes, and the cases of a kind.
BOTH = ("forward", "backward")
GROUPED = ("gqa 128 causal", "gqa 28 on 4 of 128 causal", "mqa 71 on 1 of 64 causal")
ODD = [f"odd {size} {mask}" for size in (64, 128) for mask in ("full", "causal")]
LENGTHS = [f"lengths {size} {mask}" for size in (64, 128) for mask in ("full", "causal")]
BETWEEN = [f"{size} {mask}" for size in (40, 72, 80, 96, 112) for mask in ("full", "causal")]
ONE_EXAMPLE = [f"one example {case}" for case in DENSE]
WINDOWS = ("window 1024 gqa 64", "window 1024 64", "window 256 64")
GOALS = {
    "full and causal, 2k to 16k: 64, 128 and 256": (("forward",), DENSE),
    "the same: 64 and 128": (("backward",), DENSE[:4]),
    "the same: 256": (("backward",), DENSE[4:]),
    "grouped heads: 64 on 8, 28 on 4, 71 on 1": (BOTH, GROUPED),
    "lengths that no tile divides: 1000, 1500, 3000, 5000": (BOTH, ODD),
    "lengths of each example": (BOTH, LENGTHS),
    "head sizes 40, 72, 80, 96, 112": (BOTH, BETWEEN),
    "512 and 1k, causal": (BOTH, SHORT),
    "few programs: 64 and 128": (BOTH, FEW_PROGRAMS + ONE_EXAMPLE[:4]),
    "the same: head size 256": (BOTH, ONE_EXAMPLE[4:]),
    "windows": (BOTH, WINDOWS),
}


def of_goals():
    """The rows of a table."""
    for name, (passes, cases) in GOALS.items():
        for direction in passes:
            values = sustained(direction, *cases)
            mean = statistics.geometric_mean(values)
            yield (
                PERFORMANCE,
                f"| {direction} | {name} | {len(values)} | {min(values):.2f} | {mean:.2f} |",
            )


def of_the_h100():
    at_100 = dict(file=SUSTAINED_H100)

    def found(direction, *cases):
        values = sustained(direction, *cases, **at_100)
        return statistics.geometric_mean(values), min(values)

    forward, backward = found("forward", *DENSE), found("backward", *DENSE[:4])
    wide = found("backward", *DENSE[4:])
    before = by_turns("heads at a time", "causal 128 T512", "H100")
    short = before["cuDNN"] / before["24 MB"]
    [now] = sustained("forward", SHORT[0], T=512, **at_100)
    few = sustained("forward", "one example 64 full", **at_100)
    commits = {r["commit"] for r in lines(SUSTAINED_H100)}
    assert commits == {"899291a", "ea1bf24", "eb8fa29"}
    slower = {
        r["case"]
        for r in lines(SUSTAINED_H100)
        if r["peer"] == "jax_cudnn" and "ratio" in r and r["ratio"]["median"] < 1
    }
    assert slower == {SHORT[0], "one example 64 full"}
    yield (
        PERFORMANCE,
        f"have {forward[0]:.2f} of cuDNN's speed forward in the geometric mean and "
        f"{forward[1]:.2f} at the worst; backward {backward[0]:.2f} and {backward[1]:.2f} at 64 "
        f"and 128, {wide[0]:.2f} and {wide[1]:.2f} at 256.",
    )
    yield (
        PERFORMANCE,
        f"Slower than cuDNN are 512 causal tokens at 128 ({now:.2f}) and one example at 64 without "
        f"a mask ({min(few):.2f} to {max(few):.2f}).",
    )
    yield PERFORMANCE, f"On an H100 512 causal tokens at 128 then had {short:.2f} of cuDNN's speed."


def of_sustained():
    def between(*what, **which):
        values = sustained(*what, **which)
        least, most = f"{min(values):.2f}", f"{max(values):.2f}"
        return least if least == most else f"{least} to {most}"

    few = "one example 64 full"
    [tokamax], [jax] = (
        [f"{x:.2f}" for x in sustained("forward", few, peer=peer, T=T)]
        for peer, T in (("tokamax_mosaic", 2048), ("jax_mosaic", 512))
    )
    yield (
        PERFORMANCE,
        f"One example at 64 without a mask has {tokamax} of tokamax's speed at 2048 tokens and "
        f"{jax} of JAX's at 512.",
    )
    documents, short_documents = "documents 12", "documents of 1000 64"
    packed = dict(peer="tokamax_mosaic")
    timed = {*DENSE, *GROUPED, *ODD, *SHORT, *WINDOWS, *FEW_PROGRAMS, *ONE_EXAMPLE} - {few}
    others = [
        x
        for peer in ("jax_mosaic", "tokamax_mosaic")
        for direction in BOTH
        for x in sustained(direction, *timed, peer=peer)
    ]
    yield (
        PERFORMANCE,
        f"ours has {min(others):.2f} of their speed or more in all full and causal calls and "
        "windows that were timed, but for one.",
    )
    [at_32k], [at_64k] = (sustained("forward", documents, **packed, T=T) for T in (2**15, 2**16))
    [more], [most] = (sustained("backward", documents, **packed, T=T) for T in (2**15, 2**16))
    yield (
        PERFORMANCE,
        f"With documents the forward has {at_32k:.2f} of tokamax's speed at 32768 tokens and "
        f"{at_64k:.2f} at 65536, and the backward is {more:.1f} and {most:.1f} times as fast.",
    )
    shorter = between("forward", short_documents, **packed)
    yield PERFORMANCE, f"With documents of 1000 tokens at 64 the forward has {shorter} of its speed"
    yield (
        README,
        f"full and causal ones at head sizes 64, 128 and 256 have {between('forward', *DENSE)} of "
        f"cuDNN's speed forward and {between('backward', *DENSE)} backward, grouped heads "
        f"{between('forward', *GROUPED)} and {between('backward', *GROUPED)}, head sizes from 40 "
        f"to 112 {between('forward', *BETWEEN)} and {between('backward', *BETWEEN)}, lengths of "
        f"each example {between('forward', *LENGTHS)} and {between('backward', *LENGTHS)}, and "
        f"with documents the forward has {between('forward', documents, **packed)} of tokamax's.",
    )


# As in the table.
FORWARD_OPTIONS = ("bias", "mask array", "soft cap", "ALiBi", "dropout")
BACKWARD_OPTIONS = ("bias", "trained bias", *FORWARD_OPTIONS[1:])
# Of the time without the option; the gradient of a bias is a pass more.
GOAL = {"bias": 1.5, "trained bias": math.inf, "dropout": 1.5}


def of_options():
    missed = {}
    for direction, options in (("forward", FORWARD_OPTIONS), ("backward", BACKWARD_OPTIONS)):
        times = times_of_options(direction)
        for size in (64, 128, 256):
            names = {None: f"{direction} {size}", "trained bias": "bias, with its gradient"}
            rows = []
            for option in (None, *options):
                if ms := times.get((size, option, 4096, False)):
                    ours = ms["ours_mosaic"]
                    cost = ours / times[size, None, 4096, False]["ours_mosaic"]
                    if cost > GOAL.get(option, 1.25):
                        missed[direction, size, option] = cost
                    others = [
                        f"{ms[peer] / ours:.2f}" if peer in ms else ""
                        for peer in ("ours_triton", "jax_cudnn")
                    ]
                    cells = [f"{ours:.3f}", f"{cost:.2f}" if option else "", *others]
                    rows.append(f"| {names.get(option, option)} | {' | '.join(cells)} |")
            yield PERFORMANCE, " ".join(rows)
    assert missed.keys() == {
        ("forward", 64, "bias"),
        ("forward", 64, "soft cap"),
        ("forward", 64, "dropout"),
        ("forward", 128, "soft cap"),
        ("backward", 64, "soft cap"),
        ("backward", 64, "dropout"),
    }
    yield (
        PERFORMANCE,
        "All is met at 256, the backward at 128, and the forward there but with a soft cap "
        f"({missed['forward', 128, 'soft cap']:.2f}).",
    )


def of_mosaic():
    def tokamax(*cases, **directions):
        return means("tokamax_mosaic", *cases, **directions)

    causal = ["64 causal", "128 causal", "256 causal", "gqa 128 causal"]
    forward, backward = {"directions": ["forward"]}, {"directions": ["backward"]}
    (window,) = tokamax("window 1024 gqa 64", **forward)
    (full,) = tokamax("128 full", **forward)
    assert all(map(is_level, tokamax("64 full", **forward)))
    yield (
        PERFORMANCE,
        f"Tokamax's is ahead in the forward: ours has {span(tokamax(*causal, **forward))} of its "
        f"speed under causal masks, {span(tokamax(*FEW_PROGRAMS, **forward))} where programs are "
        f"few, {100 * full:.0f} % without a mask at 128, "
        f"{span(tokamax('documents 12', **forward))} with documents; level is 64 without a mask, "
        f"and with a window ours is {window:.1f} times as fast.",
    )
    wide = means("jax_mosaic", *DENSE[2:], "gqa 128 causal", **forward)
    assert all(map(is_level, means("jax_mosaic", *DENSE[:2], **forward)))
    few = span(means("jax_mosaic", *FEW_PROGRAMS, **forward))
    yield (
        PERFORMANCE,
        f"JAX's is ahead in the forward at 128 and 256 ({span(wide)}, where programs are few "
        f"{few}), level at 64.",
    )
    at_128 = tokamax("128 causal", "128 full", "gqa 128 causal", **backward)
    at_64 = min(tokamax("64 causal", "64 full", **backward))
    one, part = tokamax(*FEW_PROGRAMS, **backward)
    (at_256,), (documents,), (windows,) = (
        tokamax(case, **backward) for case in ("256 causal", "documents 12", "window 1024 gqa 64")
    )
    (jax_128,), (jax_64,) = (means("jax_mosaic", f"{D} full", **backward) for D in (128, 64))
    assert not means("jax_mosaic", "128 causal", "64 causal", **backward)
    yield (
        PERFORMANCE,
        f"In the backward tokamax's is ahead at 128 ({span(at_128)}); ours is at 64 ({at_64:.1f} "
        f"times as fast), 256 ({at_256:.1f}), with documents ({documents:.1f}) and with a window "
        f"({windows:.1f}), where programs are few ({one:.1f} and {part:.1f}), and so it is of "
        f"JAX's, which has no causal one, at 128 and 64 ({jax_128:.1f} and {jax_64:.1f}).",
    )


def of_triton():
    cases = dict.fromkeys(r["case"] for r in records())
    behind = {
        (direction, case, peer)
        for peer in ("jax_mha", "tokamax_triton")
        for direction in ("forward", "backward")
        for case in cases
        for ratio in ratios(direction, case, peer).values()
        if ratio < 1.03
    }
    assert behind == {
        ("backward", "short 128 causal", "tokamax_triton"),
        ("backward", "small", "tokamax_triton"),
    }
    level = ratios("backward", "short 128 causal", "tokamax_triton")
    assert is_level(level[512]) and level[1024] > 1.03
    times = [1e3 * ms("backward", "small", 256, peer) for peer in ("ours", "tokamax_triton")]
    yield (
        PERFORMANCE,
        "Ours is ahead of both Pallas kernels in every row, but for the backward of 512 tokens at "
        'head size 128 (level with tokamax\'s) and that of "small", 256 tokens in float32 '
        f"({times[0]:.0f} against {times[1]:.0f} microseconds).",
    )
    others = [case for case in (*DENSE, *SHORT) if case != "64 full"]
    ahead = means("triton_tutorial", *others)
    assert is_level(mean("forward", "64 full", "triton_tutorial"))
    low, high = (f"{100 * x - 100:.0f}" for x in (min(ahead), max(ahead)))
    yield (
        PERFORMANCE,
        "A Triton kernel written by hand for full and causal masks alone is behind by "
        f"{low} to {high} %, but level at 64 without a mask.",
    )


def of_the_overview():
    panels = overview.bars(lines(SUSTAINED))
    assert len(panels) == 6
    for groups in panels.values():
        assert all(speed <= groups["pallas_flash"][0] for speed, _ in groups.values())
    yield README, "In these panels ours is ahead of all that was timed."


def of_the_run():
    ours = {(r["shape"], r["pass"]): r for r in records() if r["peer"] == "ours" and "errors" in r}
    worst = max(
        ours[r["shape"], r["pass"]]["errors"][name] / error
        for r in found(peer="jax_cudnn")
        for name, error in r["errors"].items()
    )
    yield (
        PERFORMANCE,
        f"The error of ours against IEEE float32 is at most {worst:.3f} times cuDNN's, in every "
        "result of every shape.",
    )
    red = [r for r in records() if "red" in r]
    assert {(r["case"], r["pass"], r["peer"]) for r in red} == {
        ("256 causal", "backward", "tokamax_triton")
    }
    assert min(r["red"][name] for r in red for name in ("dk", "dv")) > 5
    assert len({r["shape"] for r in found(peer="torch_flex")}) == 1
    yield PERFORMANCE, "failed the check (relative errors of dk and dv above 5)"
    forward, backward = (
        ms(direction, "window 1024 gqa 64", 32768) / ms(direction, "window 1024 gqa 64", 16384)
        for direction in ("forward", "backward")
    )
    yield (
        PERFORMANCE,
        f"a window of 1024 takes {forward:.2f} times as long forward and {backward:.2f} times "
        "backward at 32768 tokens as at 16384",
    )
    runs = {
        shape: [
            f"{r['tflops']:.0f}"
            for r in lines(SPEED)
            if (r["shape"], r["pass"], r["peer"]) == (shape, "forward", "ours")
        ]
        for shape in ("128-full-16k", "64-causal-16k")
    }
    yield (
        PERFORMANCE,
        "in the two runs behind the table 128, full, 16384 tokens had {} and {} TFLOP/s, 64 causal "
        "{} and {}".format(*runs["128-full-16k"], *runs["64-causal-16k"]),
    )


def of_decoding():
    speed = {
        (peer, S): r["tb_per_s"]
        for peer in ("ours", "jax_cudnn")
        for S in (8192, 131072)
        for r in found(case="decode gqa 128", peer=peer, S=S)
    }
    assert f"{speed['jax_cudnn', 8192]:.2f}" == f"{speed['jax_cudnn', 131072]:.2f}"
    yield (
        PERFORMANCE,
        f"{speed['ours', 131072]:.2f} TB/s for 4 examples of 131072 keys and "
        f"{speed['ours', 8192]:.2f} for 64 of 8192, where cuDNN reads "
        f"{speed['jax_cudnn', 8192]:.2f}",
    )


def of_shares():
    """The rows of a table: dk and dv of few programs, in microseconds, with the sum of shares."""
    timed = {}
    for r in lines("h200-2026-11-21-variants.jsonl"):
        if r.get("experiment") != "few programs: shares of heads" or r["batch"] != 1:
            continue
        if (r["head_dim"], r["causal"], r["dtype"]) != (128, True, "bfloat16"):
            continue
        small = r["tiles"] == {"dkv": [64, 64, 4, 3]}
        if r["tiles"] and not small:
            continue
        both = r["ms"]["pallas_flash_dkv"] + r["ms"].get("loop_reduce_fusion", 0)
        call = r["heads"], r["kv_heads"], r["q_len"]
        timed[call, r["shares"] > 1, small, r["shares"]] = 1e3 * both
    for heads, kv_heads, tokens in (
        (32, 8, 512),
        (32, 8, 1024),
        (32, 8, 2048),
        (32, 8, 4096),
        (8, 1, 2048),
        (8, 1, 8192),
        (16, 2, 4096),
    ):
        call = heads, kv_heads, tokens
        cells = []
        for shared in (False, True):
            tried = {key[3] for key in timed if key[:2] == (call, shared)}
            shares = min(tried, key=lambda n: abs(n * kv_heads * tokens - 32768))
            cells += [timed[call, shared, small, shares] for small in (False, True)]
        row = " | ".join(f"{x:.0f}" for x in cells)
        yield PERFORMANCE, f"| {heads} / {kv_heads}, {tokens} | {row} |"


def of_few_programs():
    """The rows of a table: microseconds of "mosaic", and how many times as long others take."""
    times = times_of_few_programs()
    for call in dict.fromkeys(call for call, _, _ in times):
        cells = []
        for direction in ("forward", "backward"):
            ms = {
                peer: x
                for (name, of, peer), x in times.items()
                if (name, of[0]) == (call, direction)
            }
            if not ms:
                cells.append(" |  | ")
                continue
            ours = ms["ours_mosaic"]
            cells.append(f"{1e3 * ours:.0f} | {ms['ours_triton'] / ours:.2f}")
            cells.append(f"{ms['jax_cudnn'] / ours:.2f}" if "jax_cudnn" in ms else "")
        yield PERFORMANCE, f"| {call[0]}, T = {call[1]} | " + " | ".join(cells) + " |"


def of_the_choice():
    """The rows of a table: how many times as fast "mosaic" is, the least and the most."""
    by_pass = [all_gains(attention_pass) for attention_pass in PASSES]
    for kind in dict.fromkeys(kind for found in by_pass for _, kind in found):
        cells = []
        for found in by_pass:
            for size in (64, 128, 256):
                ends = sorted(f"{x:.2f}" for x in found.get((size, kind), {}).values())
                cells.append(" to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else "")
        yield PERFORMANCE, f"| {kind} | " + " | ".join(cells) + " |"


def variant(experiment, label, D, T, causal):
    """TFLOP/s of the forward with these tiles."""
    (record,) = (
        r
        for day in ("20", "21")
        for r in lines(f"h200-2026-11-{day}-variants.jsonl")
        if r.get("experiment", "").startswith(experiment)
        and (r["label"], r["head_dim"], r["q_len"], r["causal"]) == (label, D, T, causal)
        and r["pass"] == "forward"
    )
    return f"{record['forward_flop'] / record['ms']['pallas_flash_forward'] / 1e9:.0f}"


def of_what_pays():
    def stages(n, causal):
        return variant("overlap", f"QREG= (128, 128, 8, {n}) ov=False", 128, 16384, causal)

    yield (
        PERFORMANCE,
        f"Timed, forward at 128, tiles 128 x 128: {stages(2, False)} to {stages(3, False)} TFLOP/s "
        f"full, {stages(2, True)} to {stages(3, True)} causal.",
    )

    def fence(T, causal):
        ways = ("v beside k", "fence after the maxima")
        label = "(128, 64, 8, 2), {}, the rule of before"
        return [variant("where v is", label.format(way), 256, T, causal) for way in ways]

    yield (
        PERFORMANCE,
        "Timed, forward at 256: {} to {} TFLOP/s full and {} to {} causal at 16384 tokens, "
        "{} to {} and {} to {} at 4096.".format(
            *fence(16384, False), *fence(16384, True), *fence(4096, False), *fence(4096, True)
        ),
    )
    small = "(64, 64, 4, 3), v beside k, masked tiles in a loop of their own"
    slices = "(256, 64, 8, 3, 2), v beside k, masked tiles in a loop of their own"
    apart = "(128, 64, 4, 2), fence after the maxima, masked tiles in a loop of their own"
    one_loop = "(128, 64, 4, 2), fence after the maxima, one loop"

    def rows(label, T, causal):
        return variant("128 rows", label, 128, T, causal)

    causal = [rows(label, T, True) for T in (512, 1024, 2048, 4096) for label in (small, one_loop)]
    full = [rows(label, T, False) for T in (1024, 16384) for label in (small, apart)]
    yield (
        PERFORMANCE,
        "Timed at 128, causal, against 64 x 64 tiles: {} to {} TFLOP/s at 512 tokens, {} to {} at "
        "1024, {} to {} at 2048, {} to {} at 4096".format(*causal),
    )
    yield PERFORMANCE, "Full, {} to {} at 1024, but {} to {} at 16384".format(*full)
    in_slices = [rows(label, T, True) for T in (2048, 4096, 16384) for label in (slices, one_loop)]
    grouped = [rows(f"gqa {label}", 4096, True) for label in (slices, apart)] + [
        variant("slices for", f"gqa {label}", 128, T, True)
        for T in (8192, 16384)
        for label in (slices, one_loop)
    ]
    yield (
        PERFORMANCE,
        "Causal, against 128 rows for 4 warps: {} and {} at 2048 tokens, {} and {} at 4096, {} and "
        "{} at 16384, and with 8 query heads to a key head {} and {} at 4096, {} and {} at 8192, "
        "{} and {} at 16384.".format(*in_slices, *grouped),
    )
    loops = [
        variant("structures", label, 128, T, False)
        for T in (4096, 16384)
        for label in ("default", "(256, 64, 8, 3), 2 slices")
    ]
    yield PERFORMANCE, "{} to {} at 4096, {} to {} at 16384. Causal, against".format(*loops)


def of_training():
    looks = lines("h200-2026-11-21-train.jsonl")
    command = "python scripts/train_gpt.py --preset gpt2-small"
    said = {}
    for attention in ("triton", "cudnn"):
        here = [x for x in looks if x["attention"] == attention]
        assert [x["step"] for x in here] == [200, 400, 600]
        assert all(x["command"].startswith(command) for x in here)
        time, tokens, mfu = (
            statistics.mean(x[key] for x in here) for key in ("ms", "tokens_per_second", "mfu")
        )
        said[attention] = f"{time:.1f} ms", f"{tokens / 1e3:.0f},000 tokens/s", f"{100 * mfu:.1f} %"
    ours, cudnn = said["triton"], said["cudnn"]
    yield (
        PERFORMANCE,
        f"at updates 200, 400 and 600, in the mean: {ours[0]}, {ours[1]}, {ours[2]} of the peak; "
        f"through cuDNN's attention {cudnn[0]}, {cudnn[1]} and {cudnn[2]}",
    )
    runs = lines("h200-2026-11-26-train.jsonl")
    assert len(runs) == 3
    time, rate, mfu = (
        statistics.mean(r[name] for r in runs) for name in ("ms", "tokens_per_second", "mfu")
    )
    yield (
        PERFORMANCE,
        f"three runs of {runs[0]['steps']} updates took {time:.1f} ms in the "
        f"mean, {rate / 1e3:.0f},000 tokens/s, {100 * mfu:.1f} %",
    )


CLAIMS = [
    of_cudnn,
    of_goals,
    of_the_h100,
    of_sustained,
    of_options,
    of_mosaic,
    of_triton,
    of_the_overview,
    of_the_run,
    of_decoding,
    of_shares,
    of_few_programs,
    of_the_choice,
    of_what_pays,
    of_training,
    *of_steps.CLAIMS,
]


def words(text):
    """Without line ends and bold type."""
    return " ".join(text.replace("**", "").split())


@pytest.mark.parametrize("claims", CLAIMS, ids=lambda claims: claims.__name__)
def test_sentences_have_the_numbers_of_the_results(claims):
    said = [(path, words(sentence)) for path, sentence in claims()]
    missing = [f"{path.name}: {x}" for path, x in said if x not in words(path.read_text())]
    assert said and not missing, "\n".join(["The results say otherwise:", *missing])


# ------------------------------------------------------------------------------------------------
# Tables and the figure.

TABLE = re.compile(r"<!-- python scripts/bench_attention\.py (.*?) -->\n(.*?)\n<!-- end -->", re.S)


@pytest.mark.parametrize("path", [PERFORMANCE], ids=lambda path: path.name)
def test_tables_are_printed_by_the_command_above_them(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = TABLE.findall(path.read_text())
    assert tables
    for command, table in tables:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            bench_attention.main(shlex.split(command))
        assert out.getvalue().strip() == table


def test_the_figure_shows_the_results(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = RESULTS / "h200-2026-11-26-sustained-overview.png"
    records, here = lines(SUSTAINED), tmp_path / "overview.png"
    assert path.relative_to(ROOT).as_posix() in README.read_text()
    assert overview.save(records, here)
    with image.open(path) as shown, image.open(here) as drawn:
        for picture in (shown, drawn):
            assert json.loads(picture.text["Description"]) == overview.shown(records)
        assert shown.size == drawn.size


def test_the_first_page_is_short():
    assert len(README.read_text().splitlines()) < 150
