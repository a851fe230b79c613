"""What docs/performance.md says of steps that changed the kernels for Hopper, or did not.

As in test_claims.py, where these are tested: each function yields (document, sentence).
"""

import itertools
import statistics

from results import HOPPER_VARIANTS, lines
from test_structure import ROOT

PERFORMANCE = ROOT / "docs" / "performance.md"


def by_turns(experiment, call, device="H200", turn=""):
    """Microseconds by the variant, the median of turns; of the run with most of these.

    Args:
        turn: how long one is, if there are several runs.
    """
    runs = [
        r["ms"]
        for r in lines(HOPPER_VARIANTS)
        if (r["experiment"], r["call"]) == (experiment, call) and device in r["device"]
        if turn in r["timed"]
    ]
    run = max(runs, key=lambda ms: len(ms.get("cuDNN", ())))
    return {name: 1e3 * statistics.median_low(x) for name, x in run.items()}


def of_columns():
    """The rows of a table: milliseconds before and after, the better of two runs."""
    rows = {}
    for r in lines(HOPPER_VARIANTS):
        if r["experiment"] == "columns that do not exist":
            mask, size, _ = r["call"].split()
            before, after = (min(r["ms"][x]) for x in ("before", "after"))
            rows.setdefault(size, {})[mask] = f"{before:.2f} to {after:.2f}"
    for size, of in rows.items():
        yield PERFORMANCE, f"| {size} | {of['full']} | {of.get('causal', '')} |"


def of_the_order():
    """The rows of a table, and what other variants took."""
    order, tiles = "heads at a time", "tiles of short calls"
    rows = [("H100", 128, 512), ("H100", 128, 1024), ("H200", 128, 512), ("H200", 128, 1024)]
    rows += [("H200", 64, 512), ("H200", 256, 4096), ("H200", 256, 8192), ("H200", 64, 16384)]
    columns = ("24 MB", "12 MB", "6 MB", "3 MB", "one, 2 items at the end", "cuDNN")
    for device, size, length in rows:
        ms = by_turns(order, f"causal {size} T{length}", device)
        cells = " | ".join(f"{ms[x]:.1f}" if x in ms else "" for x in columns)
        name = f"{'H100, ' if device == 'H100' else ''}{size}, T = {length}"
        yield PERFORMANCE, f"| {name} | {cells} |"
    found = {
        (device, T): by_turns(tiles, f"causal 128 T{T}", device)
        for device, T in itertools.product(("H200", "H100"), (512, 1024))
    }
    before = {key: f"{ms['2 128 2 2']:.1f}" for key, ms in found.items()}
    now = {key: f"{ms['3 64 1 3']:.1f}" for key, ms in found.items()}
    yield (
        PERFORMANCE,
        f"they took {now['H200', 512]} in place of {before['H200', 512]} (128, H200; one head at a "
        f"time), {now['H100', 512]} in place of {before['H100', 512]} (H100; 24 MB), but "
        f"{now['H200', 1024]} in place of {before['H200', 1024]} and {now['H100', 1024]} in place "
        f"of {before['H100', 1024]} at 1024.",
    )


def of_items():
    def both(size, length, name="an item begins before the last has ended"):
        ms = by_turns(name, f"causal {size} T{length}")
        return f"{ms['no']:.1f} to {ms['yes']:.1f}"

    yield (
        PERFORMANCE,
        f"By turns: {both(128, 512)} at 128 causal and 512 tokens, {both(128, 1024)} at 1024, and "
        "level from 2048 on, also without a mask and at 80; at 64 "
        f"{both(64, 512)} (512), {both(64, 2048)} (2048) and {both(64, 4096)} (4096).",
    )
    short, longer = (by_turns("no list", f"one example 128 full {n}k") for n in (1, 2))
    yield (
        PERFORMANCE,
        f"1024 tokens at 128 take {short['none']:.1f} in place of {short['list']:.1f} "
        f"microseconds, cuDNN {short['cuDNN']:.1f}; but where two programs share keys, as those of "
        f"2048 did, they took {longer['none']:.1f} in place of {longer['list']:.1f}, and have "
        "lists still.",
    )


def of_zigzag():
    """The rows of a table, and times of calls with options and without a mask."""
    calls = [(128, 16, 1024), (128, 8, 2048), (128, 16, 512), (128, 4, 4096), (128, 1, 16384)]
    calls += [(64, 16, 1024), (64, 32, 512), (64, 1, 16384), (80, 16, 1024), (256, 8, 1024)]
    for size, heads, length in calls:
        heads = f"{heads} head{'s' if heads > 1 else ''}"
        ms = by_turns("parts lie zigzag", f"causal {size}, {heads}, T{length}")
        columns = ("neighbours", "zigzag, three warpgroups", "zigzag", "cuDNN")
        cells = " | ".join(f"{ms[x]:.1f}" if x in ms else "" for x in columns)
        yield PERFORMANCE, f"| {size}, {heads}, T = {length} | {cells} |"

    def both(option):
        ms = by_turns("parts lie zigzag", f"causal 64, with {option}, 16 heads, T1024")
        return f"{ms['neighbours']:.0f} to {ms['zigzag']:.0f}"

    yield (
        PERFORMANCE,
        f"With options likewise, at 64 and 1024 tokens of 16 heads: {both('a soft cap')} (soft "
        f"cap), {both('slopes')} (slopes), {both('a bias')} (bias).",
    )

    prototype = "prototype: items zigzag, or without a list"
    short, longer = (by_turns(prototype, f"causal 128, 16 heads, T{n}") for n in (1024, 2048))
    yield (
        PERFORMANCE,
        f"2048 tokens of 16 heads took {longer['zigzag']:.1f} in place of "
        f"{longer['neighbours']:.1f} on an H200.",
    )
    yield (
        PERFORMANCE,
        f"Items need lists still, though these could be computed: {short['neighbours']:.1f} to "
        f"{short['no list']:.1f} microseconds, with neighbours.",
    )

    def full(heads, length):
        ms = by_turns("two warpgroups", f"full 64, {heads} heads, T{length}")
        return f"{ms['three']:.1f} to {ms['two']:.1f} (cuDNN {ms['cuDNN']:.1f})"

    yield (
        PERFORMANCE,
        f"16 heads of 1024 {full(16, 1024)}, 32 {full(32, 1024)}, 8 heads of 2048 {full(8, 2048)}, "
        f"16 {full(16, 2048)}.",
    )


# Programs that share out the queries of a head, by head size, heads and tokens of the calls timed.
PARTS = {
    **{(128, 4, 2048): 2, (128, 8, 1024): 2, (128, 16, 512): 1},
    **{(64, 4, 2048): 2, (64, 8, 1024): 2, (64, 16, 512): 1},
    **{(256, 4, 2048): 2, (256, 8, 1024): 2, (256, 8, 512): 4, (256, 8, 2048): 1},
}


def times_of_parts(mask, size, heads, length):
    """Microseconds by the number of programs, "triton" and "cuDNN"."""
    return by_turns("queries of a head shared out", f"{mask} {size}, {heads} heads, T{length}")


def of_parts():
    """The rows of a table, with what is taken in bold."""
    for (size, heads, length), taken in PARTS.items():
        for mask in ("full", "causal"):
            ms = times_of_parts(mask, size, heads, length)
            cells = [f"**{ms[x]:.1f}**" if x == str(taken) else f"{ms[x]:.1f}" for x in "1234"]
            cells += [f"{ms[x]:.1f}" for x in ("triton", "cuDNN")]
            name = f"{size} {mask}, {heads} heads, T = {length}"
            yield PERFORMANCE, f"| {name} | {' | '.join(cells)} |"


def of_pairs():
    """The rows of a table, in turns that leave the card hot and others."""
    rows = [("full", 128, 16, 2048), ("full", 128, 32, 2048), ("full", 128, 8, 4096)]
    rows += [("causal", 128, *x) for x in ((8, 4096), (16, 4096), (16, 8192))]
    rows += [("full", 256, 8, 2048), ("causal", 256, 8, 4096), ("causal", 256, 16, 4096)]
    for mask, size, heads, length in rows:
        call = f"{mask} {size}, {heads} heads, T{length}"
        turns = ("of 0.25", "of 0.05")
        hot, cool = (by_turns("programs alone or in pairs", call, turn=x) for x in turns)
        cells = [found[x] for found in (hot, cool) for x in ("in pairs", "alone", "cuDNN")]
        numbers = " | ".join(f"{x:.1f}" for x in cells)
        yield PERFORMANCE, f"| {size} {mask}, {heads} heads, T = {length} | {numbers} |"
    narrow, few = (
        by_turns("programs alone or in pairs", f"full {call}", turn="of 0.05")
        for call in ("96, 16 heads, T2048", "128, 4 heads, T4096")
    )
    yield (
        PERFORMANCE,
        f"16 heads of 2048 at 96 took {narrow['in pairs']:.1f} in pairs and {narrow['alone']:.1f} "
        f"alone, and 4 heads of 4096 at 128 {few['in pairs']:.1f} and {few['alone']:.1f}.",
    )


def of_queries_in_registers():
    def both(call, tile):
        ms = by_turns("queries in registers", call)
        return f"{ms[tile]:.1f} to {ms[f'{tile}, registers']:.1f}"

    def table(call):
        return f"{by_turns('queries in registers', call)['table']:.1f}"

    wide, narrow = "2 128 2 2 2", "3 96 1 4"
    long, short = "causal 128 T16384", "causal 128 T4096"
    full, at_64, full_64 = "full 128 T16384", "causal 64 T4096", "full 64 T4096"
    yield (
        PERFORMANCE,
        f"By turns, at 128 causal {both(long, wide)} (16384 tokens) and {both(short, wide)} (4096),"
        f" full {both(full, wide)}, where tiles of 176 keys take {table(full)}; at 64 in tiles of "
        f"96 keys {both(at_64, narrow)} causal and {both(full_64, narrow)} full, in those of 128 "
        f"{table(at_64)} and {table(full_64)} without.",
    )


def of_blocks():
    ms = {
        (r["tile"]["warpgroups"], r["tile"]["block_kv"], r["tile"]["stages"]): r["ms"]
        for r in lines(HOPPER_VARIANTS)
        if r["experiment"] == "tiles with blocks" and r["call"] == "blocks 64 T4096"
    }
    before, now, narrow, low = (
        ms[tile]["mosaic"] for tile in ((3, 96, 2), (2, 128, 2), (2, 64, 4), (3, 64, 2))
    )
    yield (
        PERFORMANCE,
        f'4096 tokens took {before:.2f} ms, "triton" {ms[3, 96, 2]["triton"]:.2f}. In tiles of '
        f"128 x 128 it is {now:.2f}, of 128 x 64 {narrow:.2f}, of 192 x 64 {low:.2f} ms",
    )


CLAIMS = [
    of_columns,
    of_the_order,
    of_items,
    of_zigzag,
    of_parts,
    of_pairs,
    of_queries_in_registers,
    of_blocks,
]
