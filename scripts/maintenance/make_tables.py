"""Writes what README and docs show of docs/results: tables and figures.

    python scripts/maintenance/make_tables.py          # after a measurement, or an edit of a marker
    python scripts/maintenance/make_tables.py --check  # write nothing; fail if it would

A table stands between two markers, of which the first names it:

    <!-- table: NAME ARGUMENT... -->         NAME is a key of `TABLES`
    <!-- end -->

A number in a sentence is written by hand, and tests/commands/test_results.py compares it with the
results.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scripts.benchmarks import curves, key_bias, overview, report, results
from scripts.benchmarks.choice import HEAD_DIMS, KINDS, PASSES, gains_by_length
from scripts.benchmarks.results import RESULTS, time
from scripts.benchmarks.shapes import short, visited_blocks
from scripts.command import UserError, command

ROOT = pathlib.Path(__file__).parents[2]
# The lines of a file that a figure shows, and the module that draws it.
FIGURES = {
    RESULTS / "h200-overview.png": (lambda: records("h200"), overview),
    RESULTS / "h200-curves.png": (lambda: records("h200"), curves),
    RESULTS / "h100-curves.png": (lambda: records("h100"), curves),
    RESULTS / "h200-key-bias.png": (lambda: lines_of("h200-accuracy"), key_bias),
}

# The name of a group of calls: what tables call it, and its cases, where "*" is full and causal.
GROUPS = {
    "dense": ("2k to 16k tokens, head dims 64, 128 and 256", "64-* 128-* 256-*"),
    "dense-64": ("2k to 16k tokens, head dim 64", "64-*"),
    "dense-256": ("2k to 16k tokens, head dim 256", "256-*"),
    "grouped": (
        "grouped heads: 64 on 8, 28 on 4, 71 on 1",
        "gqa-128-causal gqa-28-on-4-of-128-causal mqa-71-on-1-of-64-causal",
    ),
    "fa3": ("head dim 128, causal, 2k to 16k tokens", "128-causal gqa-128-causal"),
    "odd": ("1000, 1500, 3000 and 5000 tokens", "odd-64-* odd-128-*"),
    "lengths": ("lengths of each sequence in the batch", "lengths-64-* lengths-128-*"),
    "narrow": ("head dims 40, 72, 80, 96 and 112", "40-* 72-* 80-* 96-* 112-*"),
    "short": ("512 and 1k tokens, causal", "short-64-causal short-128-causal"),
    "small": (
        "batch size 1, head dims 64 and 128",
        "gqa-one-example gqa-8-of-64-heads one-example-64-* one-example-128-*",
    ),
    "small-256": ("batch size 1, head dim 256", "one-example-256-*"),
    "window": ("windows", "window-1024-gqa-64 window-1024-64 window-256-64"),
}

# ------------------------------------------------------------------------------------------------
# Lines of the results.


@functools.cache
def records(file: str) -> list[dict[str, Any]]:
    """Return the timed lines of a file, of each measurement the latest."""
    return [r for r in report.load(RESULTS / f"{file}.jsonl") if "ms" in r]


@functools.cache
def lines_of(file: str) -> list[dict[str, Any]]:
    """Return all lines of a file."""
    return results.load(RESULTS / f"{file}.jsonl")


def chosen(file: str, attention_pass: str, calls: str, implementation: str) -> list[dict]:
    """Return the lines of a pass and an implementation.

    `calls` is a key of `GROUPS`, or a case or shape with `-` for spaces.
    """
    _, cases = GROUPS.get(calls, ("", calls))
    named = {case.replace("*", mask) for case in cases.split() for mask in ("full", "causal")}
    return [
        r
        for r in records(file)
        if (slug(r["pass"]), r["implementation"]) == (attention_pass, implementation)
        if named & {slug(r["case"]), slug(r["shape"])}
    ]


def slug(words: str) -> str:
    """Return words without spaces."""
    return words.replace(" ", "-")


def ratios(lines: Iterable[dict[str, Any]]) -> list[float]:
    """Return how many times as fast ours is, in each of the lines."""
    return [r["ratio"]["median"] for r in lines if "ratio" in r]


# ------------------------------------------------------------------------------------------------
# Tables of Markdown.


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["".join(f"| {x} " if x else "| " for x in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


TIMES = "\N{MULTIPLICATION SIGN}"
# The names of implementations in tables.
NAMES = {
    "ours": "pallas_flash",
    "ours_mosaic": "Hopper kernels",
    "ours_triton": "Triton kernels",
    "jax_cudnn": "cuDNN",
    "jax_mha": "JAX, Triton",
    "jax_mosaic": "JAX, Mosaic GPU",
    "tokamax_triton": "tokamax, Triton",
    "tokamax_mosaic": "tokamax, Mosaic GPU",
    "flash_attention_3": "FlashAttention-3",
    "cuequivariance": "cuEquivariance",
    "triton_tutorial": "Triton tutorial",
    "torch_cudnn": "PyTorch, cuDNN",
    "torch_flash": "PyTorch, FlashAttention-2",
    "torch_flex": "PyTorch, FlexAttention",
}
# The words of cases in tables.
WORDS = {
    "full": "non-causal",
    "gqa one example": "grouped heads, batch size 1",
    "one example": "batch size 1",
    "gqa": "grouped heads",
    "mqa": "grouped heads",
    "odd": "odd lengths",
}


def in_words(text: str) -> str:
    """Return the names of implementations and of kinds of calls in the words of the documents."""
    words = NAMES | WORDS
    text = re.sub(r"\bdocuments (\d+)\b", r"\1 documents", text)
    return re.sub(rf"\b({'|'.join(words)})\b", lambda match: words[match[1]], text)


def case_in_words(attention_pass: str, case: str) -> str:
    """Return a pass and the name of a case in the words of the documents."""
    words = case.split(" ")
    mask = [words.pop()] if words[-1] in ("full", "causal") else []
    named = " ".join(words)
    parts, number = [named], re.search(r"(?:^| (?:of )?)(\d+(?: and \d+)?)$", named)
    if number and not re.fullmatch(r"documents \d+", named):
        parts = [named[: number.start()], f"head dim {number[1]}"]
    return in_words(", ".join(filter(None, [attention_pass, *parts, *mask])))


def attention(file: str) -> str:
    """Return speeds by case, and ratios to each other implementation."""
    head, line, *rows = report.table(records(file)).split("\n")
    head = head.replace("| |", "| call |", 1).replace("| T |", "| tokens |")
    lines = [in_words(head.replace("ours,", "ours:")), line]
    for row in rows:
        _, call, cells = row.split("|", 2)
        lines.append(f"| {case_in_words(*call.strip().split(' ', 1))} |{cells}")
    return "\n".join(lines)


def mean_and_worst(numbers: Sequence[float]) -> str:
    """Return the geometric mean of ratios, and in brackets the worst."""
    if not numbers:
        return ""
    return f"{statistics.geometric_mean(numbers):.2f}{TIMES} ({min(numbers):.2f}{TIMES})"


def kinds(*files: str) -> str:
    """Return the ratios to cuDNN by kind of call, on each GPU, and how many calls these are."""
    passes = [(file, x) for file in files for x in ("forward", "backward")]
    rows = []
    for calls, (text, _) in GROUPS.items():
        by_pass = [ratios(chosen(*x, calls, "jax_cudnn")) for x in passes]
        rows.append([text, *(f"{mean_and_worst(x)}, {len(x)}" if x else "" for x in by_pass)])
    return markdown(["calls", *(f"{file.upper()}, {x}" for file, x in passes)], rows)


def speed(*groups: str) -> str:
    """Return the ratios to cuDNN by kind of call, on an H200 or on the GPU before a colon."""
    rows = []
    for group in groups:
        file, calls = group.split(":") if ":" in group else ("h200", group)
        text = GROUPS[calls][0] + (f", on an {file.upper()}" if ":" in group else "")
        by_pass = (ratios(chosen(file, x, calls, "jax_cudnn")) for x in ("forward", "backward"))
        rows.append([text, *map(mean_and_worst, by_pass)])
    return markdown(["calls, bfloat16", "forward", "backward"], rows)


def calls(*files: str) -> str:
    """Return the calls that the means of `kinds` are of, on each GPU."""

    def timed(file, attention_pass, group):
        lines = chosen(file, attention_pass, group, "jax_cudnn")
        return {(case_in_words("", r["case"]), r["T"]) for r in lines if "ratio" in r}

    rows = []
    for group, (text, _) in GROUPS.items():
        cells: list[str] = []
        for file in files:
            forward, backward = (timed(file, x, group) for x in ("forward", "backward"))
            cell = calls_by_length(forward)
            if not backward:
                cell += ". No backward"
            elif alone := forward - backward:
                cell += f". Forward alone: {calls_by_length(alone)}"
            cells.append("the same" if cell in cells else cell)
        rows.append([text, *cells])
    return markdown(["calls", *(file.upper() for file in files)], rows)


def calls_by_length(calls: Iterable[tuple[str, int]]) -> str:
    """Return calls in words, those with the same lengths together."""

    def by_number(call):
        return re.sub(r"\d+", lambda match: match[0].zfill(6), call[0]), call[1]

    lengths: dict[str, list[str]] = {}
    for case, length in sorted(calls, key=by_number):
        lengths.setdefault(case, []).append(short(length))
    cases: dict[str, list[str]] = {}
    for case, texts in lengths.items():
        cases.setdefault(", ".join(texts), []).append(case)
    return "; ".join(f"{'; '.join(x)}: {texts}" for texts, x in cases.items())


def losses(*files: str) -> str:
    """Return all calls in which a peer was faster, by 1 % or more after rounding."""
    table: dict[tuple[str, str], dict[str, list[str]]] = {}
    for file in files:
        for r in sorted(records(file), key=lambda r: (r["pass"] != "forward", r["D"], r["T"])):
            if "ratio" not in r or (ratio := f"{r['ratio']['median']:.2f}") >= "1.00":
                continue
            row = case_in_words(r["pass"], r["case"]), NAMES[r["implementation"]]
            table.setdefault(row, {}).setdefault(file, []).append(
                f"{ratio}{TIMES} at {short(r['T'])}"
            )
    rows = [[*row, *(", ".join(cells.get(x, [])) for x in files)] for row, cells in table.items()]
    return markdown(["call", "peer", *(file.upper() for file in files)], sorted(rows))


def peers(file: str) -> str:
    """Return the ratios to each other implementation, over all calls that both were timed in."""
    rows = []
    for name, words in NAMES.items():
        lines = [r for r in records(file) if r["implementation"] == name and "ratio" in r]
        if name.startswith("ours") or not lines:
            continue
        cells = []
        for attention_pass in ("forward", "backward"):
            speedups = ratios(r for r in lines if r["pass"] == attention_pass)
            cells += [str(len(speedups)) if speedups else "", mean_and_worst(speedups)]
        rows.append([words, *cells])
    heads = (f"{x}{y}" for x in ("forward", "backward") for y in (" calls", ""))
    return markdown(["peer", *heads], rows)


def lines_by_call(file: str, case: str) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Return the lines of a case by pass and tokens, and then by implementation."""
    calls: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for r in sorted(records(file), key=lambda r: (r["pass"] != "forward", r["T"])):
        if r["case"] == case:
            calls.setdefault((r["pass"], r["T"]), {})[r["implementation"]] = r
    return calls


def triangles(file: str) -> str:
    """Return times and memory of triangle attention beside other implementations."""
    names = {name: NAMES.get(name, "XLA") for name in ("jax_xla", "jax_cudnn", "cuequivariance")}
    rows = []
    for (attention_pass, T), lines in lines_by_call(file, "triangle 32 with trained bias").items():
        ours, others = lines["ours"], [lines.get(name) for name in names]
        ratios = (f"{time(x) / time(ours):.2f}{TIMES}" if x else "" for x in others)
        memory = (f"{sum(x['memory'].values()) / 1e6:.0f}" if x else "" for x in (ours, *others))
        rows.append([f"{attention_pass}, {T}", f"{time(ours):.3f}", *ratios, *memory])
    heads = [f"{x}, MB" for x in ("ours", *names.values())]
    return markdown(["pass, tokens", "ours, ms", *(f"/ {x}" for x in names.values()), *heads], rows)


def sparse(file: str) -> str:
    """Return times of chosen blocks beside dense attention, and beside their share of it."""
    dense, rows = "gqa 16 on 4 of 128 causal", []
    chosen_blocks = lines_by_call(file, f"{dense} with 16 chosen blocks")
    for (attention_pass, T), lines in lines_by_call(file, dense).items():
        ms, few = (time(x["ours"]) for x in (lines, chosen_blocks[attention_pass, T]))
        share = visited_blocks(T, 16) / visited_blocks(T)
        cells = f"{ms:.2f}", f"{few:.2f}", f"{100 * share:.1f} %", f"{few / (share * ms):.2f}"
        rows.append([f"{attention_pass}, {short(T)}", *cells])
    head = ["pass, tokens", "dense, ms", "16 blocks, ms", "share of blocks"]
    return markdown([*head, "time / (share x dense)"], rows)


# Kernels, and what compiles them.
WAYS = {
    "ours": "Pallas, Triton",
    "jax_mha": "Pallas, Triton",
    "tokamax_triton": "Pallas, Triton",
    "triton_tutorial": "jax-triton",
    "jax_mosaic": "Pallas, Mosaic GPU",
    "tokamax_mosaic": "Pallas, Mosaic GPU",
    "jax_cudnn": "cuDNN",
}


def ways(file: str) -> str:
    """Return the speeds of kernels that are compiled in different ways, at 16k tokens."""
    cases = ("64-full", "128-full", "128-causal")
    columns = [(x, f"{case}-16k") for x in ("forward", "backward") for case in cases]
    rows = []
    for name, way in WAYS.items():
        lines = [chosen(file, attention_pass, call, name) for attention_pass, call in columns]
        speeds = (f"{x[0]['tflops']:.0f}" if x else "" for x in lines)
        rows.append([way, NAMES[name], *speeds])
    head = (case_in_words(x, call.removesuffix("-16k").replace("-", " ")) for x, call in columns)
    return markdown(["way", "kernel", *head], rows)


def times(file: str) -> str:
    """Return microseconds, the fastest in bold; in brackets as a part of the first column's."""
    table: dict[str, dict[str, float]] = {}
    for r in sorted(records(file), key=lambda r: (r["pass"] != "forward", r["D"])):
        row = f"{case_in_words(r['pass'], r['case'])}, {r['T']} tokens"
        column = " ".join([r["implementation"], *map(str, r["config"].values())])
        table.setdefault(row, {})[column] = 1e3 * time(r)
    columns = list(dict.fromkeys(column for us in table.values() for column in us))
    rows = []
    for row, us in table.items():
        cells = [f"{us[x]:.1f} ({us[x] / us[columns[0]]:.2f})" if x in us else "" for x in columns]
        cells[0] = cells[0].split()[0]
        fastest = columns.index(min(us, key=lambda x: us[x]))
        cells[fastest] = f"**{cells[fastest]}**"
        rows.append([row, *cells])
    return in_words(markdown(["call", *columns], rows))


def options(file: str) -> str:
    """Return times of full attention with options: milliseconds, and ratios."""
    rows, times = [], {}
    for r in sorted(records(file), key=lambda r: (r["pass"] != "forward", r["D"])):
        if (r["T"], r["causal"]) == (4096, False):
            times.setdefault((r["pass"], r["D"], r["option"]), {})[r["implementation"]] = time(r)
    for (attention_pass, D, option), ms in times.items():
        if (attention_pass, option) == ("forward", "trained bias"):
            continue
        ours = ms["ours_mosaic"]
        without = times[attention_pass, D, None]["ours_mosaic"]
        others = [ms.get(name) for name in ("ours_triton", "jax_cudnn")]
        rows.append(
            [
                ", ".join(filter(None, [attention_pass, f"head dim {D}", option])),
                f"{ours:.3f}",
                f"{ours / without:.2f}" if option else "",
                *(f"{x / ours:.2f}" if x else "" for x in others),
            ]
        )
    head = ["pass, head dim, option", "Hopper kernels, ms", "of the time without the option"]
    return markdown([*head, "/ Triton kernels", "/ cuDNN"], rows)


def choice() -> str:
    """Return how many times as fast "mosaic" is as "triton", the least and the most."""
    gains = gains_by_length()
    rows = []
    for kind in KINDS:
        cells = []
        for attention_pass in PASSES:
            for D in HEAD_DIMS:
                cells.append(least_and_most(gains.get((attention_pass, kind, D), {}).values()))
        rows.append([in_words(kind), *cells])
    head = [f"{x}, 64" for x in ("forward", "backward", "reproducible")]
    return markdown(["calls", *(x for name in head for x in (name, "128", "256"))], rows)


def least_and_most(numbers: Iterable[float]) -> str:
    """Return the ends of a range, or one number if they are equal."""
    ends = sorted(f"{x:.2f}" for x in numbers)
    return " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else ""


ERRORS_OF = {
    "ours_mosaic": "Hopper",
    "ours_mosaic, reproducible": "Hopper, reproducible",
    "ours_triton": "Triton",
    "ours_xla": "XLA",
    "dense": "dense",
    "jax_xla": "jax.nn",
    "jax_cudnn": "cuDNN",
    "flash_attention_3": "FlashAttention-3",
}


def dq_errors(file: str, value_mean: str) -> str:
    """Return the relative error of dq with a key bias of 50, by case and implementation."""
    inputs = {"key_bias": 50, "value_mean": int(value_mean), "zero_sum": False}
    return errors_of(file, lambda r: r["config"] == inputs and r["result"] == "dq", "case")


def errors(file: str, key_bias: str, value_mean: str, zero_sum: str) -> str:
    """Return relative errors of outputs and gradients with such inputs."""
    inputs = {"key_bias": int(key_bias), "value_mean": int(value_mean), "zero_sum": zero_sum == "1"}
    usual = "o", "dq", "dk", "dv"

    def wanted(r):
        # Options change o and dv little: "causal" shows them, other calls what they are about.
        own = r["case"] == "causal" or r["result"] not in usual
        few = r["case"] in ("soft cap", "grouped heads", "three keys", "wide values")
        return r["config"] == inputs and (own or (few and r["result"] in ("dq", "dk")))

    return errors_of(file, wanted, "result, case", "result")


def errors_of(file: str, wanted: Callable, first: str, *names: str) -> str:
    """Return errors, a row for each `names` of a record and its call, of what `wanted` selects."""
    table: dict[str, dict[str, str]] = {}
    for r in lines_of(file):
        if "error" in r and wanted(r):
            row = ", ".join([*(r[x] for x in names), r["case"], str(r["D"]), r["dtype"]])
            # A later measurement replaces an earlier one.
            table.setdefault(row, {})[r["implementation"]] = f"{r['error']:.4f}"
    rows = [[row, *(errors.get(x, "") for x in ERRORS_OF)] for row, errors in table.items()]
    return markdown([f"{first}, head dim, dtype", *ERRORS_OF.values()], rows)


def training(file: str) -> str:
    """Return the updates of the GPT, by the implementation of attention."""
    rows = []
    for name in ("ours_mosaic", "ours_triton", "jax_cudnn"):
        lines = chosen(file, "update", "gpt2-small", name)
        tokens, mfu = (
            statistics.mean(r[field] for r in lines) for field in ("tokens_per_second", "mfu")
        )
        ms = f"{statistics.mean(map(time, lines)):.1f}"
        day = max(r["date"][:10] for r in lines)
        rows.append([NAMES[name], day, ms, f"{round(tokens, -3):,.0f}", f"{100 * mfu:.1f} %"])
    head = ["attention", "measured", "ms an update", "tokens a second", "share of the peak"]
    return markdown(head, rows)


# Cases of bench_pages.py.
OF_PAGES = {
    "64-4k": "64 requests of 4k decode",
    "64-ragged-32k": "64 requests of 1 to 32k decode",
    "one-32k": "one of 32k decodes",
    "verify-8-64-4k": "64 of 4k, 8 drafts each",
    "verify-8-one-32k": "one of 32k, 8 drafts",
    "chunk-512-beside-63-4k": "512 tokens of a prompt, beside 63 of 4k that decode",
    "chunk-512-alone-4k": "512 tokens of a prompt of 4k",
    "chunk-512-alone-32k": "512 tokens of a prompt of 32k",
}


def pages(file: str) -> str:
    """Return times of a layer's steps with pages, beside cuDNN without pages."""
    rows = []
    for D in sorted({r["D"] for r in records(file)}, key=lambda n: (n != 128, n)):
        for case, name in OF_PAGES.items():
            lines = {
                r["implementation"]: r for r in records(file) if (r["case"], r["D"]) == (case, D)
            }
            if not lines:
                continue
            ours, *others = (lines[x] for x in ("mosaic", "triton", "cudnn"))
            ratios = (f"{time(x) / time(ours):.2f}{TIMES}" for x in others)
            rate = f"{ours['tflops']:.0f} TFLOP/s"
            if "prompt" not in name:
                rate = f"{ours['tb_per_s']:.2f} TB/s"
            rows.append([f"{name}, head dim {D}", f"{time(ours):.3f}", rate, *ratios])
    return markdown(["step", "ms", "", "Triton / ours", "cuDNN / ours"], rows)


def engine(file: str) -> str:
    """Return the speed of the engine, beside `Generation`."""
    rows = []
    for r in records(file):
        model, case = r["shape"].rsplit("-", 1)
        first = r["first_token_s"]
        cells = [f"{r['tokens_per_s']:,.0f}", f"{first['median']:.2f}, {first['p90']:.2f}", "", ""]
        if case == "decode":
            cells[2:] = f"{time(r):.2f}", f"{r['share']:.2f}"
        name = r["implementation"]
        name = name if name == "transformers" else f"`{name.capitalize()}`"
        rows.append([f"{model}, {case}, {name}", *cells])
    head = ["tokens/s", "first token, s: median, 9 of 10", "ms a step", "share of the memory"]
    return markdown(["model, case", *head], rows)


def invariance(file: str) -> str:
    """Return times with `batch_invariant`, beside those without."""
    calls: dict[str, dict[str, float]] = {}
    for r in records(file):
        default, name = r["implementation"].removeprefix("ours_"), r["case"]
        call = case_in_words("forward", name) + f", {short(r['T'])} tokens"
        if name in OF_PAGES:
            call = f"{OF_PAGES[name]}, head dim {r['D']}"
        calls.setdefault(call, {})[default] = time(r)
    rows = [
        [call, f"{x['mosaic']:.3f}", f"{x['invariant']:.3f}", f"{x['invariant'] / x['mosaic']:.2f}"]
        for call, x in calls.items()
    ]
    return markdown(["call", "ms", "batch-invariant, ms", "ratio"], rows)


def reproducible(file: str) -> str:
    """Return the speed with `reproducible` relative to the default, by length."""
    lines = [r for r in records(file) if r["implementation"] == "ours_reproducible"]
    lengths = sorted({r["T"] for r in lines})
    calls: dict[str, dict[int, str]] = {}
    for r in sorted(lines, key=lambda r: (r["D"], r["causal"] is False)):
        call = case_in_words("", r["case"])
        calls.setdefault(call, {})[r["T"]] = f"{1 / r['ratio']['median']:.2f}"
    rows = [[call, *(cells.get(T, "") for T in lengths)] for call, cells in calls.items()]
    return markdown(["call", *map(short, lengths)], rows)


# TFLOP/s of the matrix units of an H200 for each MHz: 132 SMs, 4096 operations a cycle in 16 bits.
PEAK_OF_MHZ = 132 * 4096 * 1e-6


def limits(file: str) -> str:
    """Return the speed at 16k tokens as a share of the matrix units' peak at its clock."""
    rows = []
    for case in (f"{D}-{mask}" for D in (64, 128, 256) for mask in ("causal", "full")):
        cells = []
        for attention_pass in ("forward", "backward"):
            for name in ("ours", "jax_cudnn"):
                (r,) = chosen(file, attention_pass, f"{case}-16k", name)
                peak = PEAK_OF_MHZ * r["clocks"]["clocks.sm"]
                cells.append(f"{r['tflops']:.0f} of {peak:.0f}, {100 * r['tflops'] / peak:.0f} %")
        rows.append([case_in_words("", case.replace("-", " ")), *cells])
    heads = (f"{x}, {NAMES[n]}" for x in ("forward", "backward") for n in ("ours", "jax_cudnn"))
    return markdown(["call", *heads], rows)


STEPS = sorted((ROOT / "docs" / "hopper_steps").glob("step[0-9]_*.py"))


def step(number: str) -> str:
    """Return the code of the first step, or what a later one changes, indentation aside."""
    before, after = ([] if n < 0 else _code(STEPS[n]) for n in (int(number) - 2, int(number) - 1))
    if not before:
        return "\n".join(["```py", *after, "```"])
    old_words, new_words = ([line.strip() for line in x] for x in (before, after))
    lines: list[str] = []
    for hunk in difflib.SequenceMatcher(None, old_words, new_words).get_grouped_opcodes(1):
        lines += ["@@"] if lines else []
        for tag, old, old_end, new, new_end in hunk:
            if tag == "equal":
                lines += (f" {x}" for x in after[new:new_end] if x)
            else:
                lines += (f"-{x}" for x in before[old:old_end])
                lines += (f"+{x}" for x in after[new:new_end])
    return "\n".join(["```diff", *lines, "```"])


def _code(path: pathlib.Path) -> list[str]:
    """Return the lines of a file below its imports."""
    text = path.read_text(encoding="utf-8")
    return text[text.index("QUERIES, KEYS") :].splitlines()


def steps(file: str) -> str:
    """Return the speeds of the steps and of the shipped kernel, or that there are none."""
    if not (RESULTS / f"{file}.jsonl").exists():
        return "The times are not measured yet."
    timed = _timed_steps(file)
    rows = []
    for number, name in enumerate([*(path.stem for path in STEPS), "ours"], 1):
        cells = []
        for case in STEP_CASES:
            if r := timed.get((name, case)):
                # The ratio is of turns that both took on one hot GPU.
                cells += [f"{r['tflops']:.0f}", f"{1 / r['ratio']['median']:.2f}{TIMES}"]
            else:
                cells += ["", ""]
        rows.append(["shipped kernel" if name == "ours" else f"step {number}", *cells])
    head = ["non-causal, TFLOP/s", "of shipped", "causal, TFLOP/s", "of shipped"]
    return markdown(["kernel", *head], rows)


STEP_CASES = {"128 full": "non-causal", "128 causal": "causal"}


def _timed_steps(file: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the records of each step and of the shipped kernel, by name and case."""
    return {(r["implementation"], r["case"]): r for r in records(file)}


def step_speed(number: str, file: str) -> str:
    """Return a sentence for each call with a step's speed, also relative to the step before."""
    timed, n = _timed_steps(file), int(number) - 1
    sentences = []
    for case, words in STEP_CASES.items():
        if not (r := timed.get((STEPS[n].stem, case))):
            continue
        before = timed.get((STEPS[n - 1].stem, case)) if n else None
        relative = f", {r['tflops'] / before['tflops']:.2f}{TIMES} step {n}" if before else ""
        sentences.append(f"{words} {r['tflops']:.0f} TFLOP/s{relative}")
    return f"**Measured:** {'; '.join(sentences) or 'not yet'}."


def files() -> str:
    """Return what the files of docs/results are, byte for byte."""
    rows = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        name, content, lines = path.name, path.read_bytes(), results.load(path)
        days = sorted({r["date"][:10] for r in lines})
        cells = [
            ", ".join(sorted({r["device"] for r in lines})),
            ", ".join(sorted({r["versions"]["jax"] for r in lines})),
            " to ".join(dict.fromkeys((days[0], days[-1]))),
            hashlib.sha256(content).hexdigest()[:16],
        ]
        rows.append([f"[{name}]({name})", str(content.count(b"\n")), *cells])
    return markdown(["file", "lines", "device", "JAX", "measured", "SHA-256 begins"], rows)


# ------------------------------------------------------------------------------------------------
# Documents.

TABLES = {
    "attention": attention,
    "kinds": kinds,
    "speed": speed,
    "calls": calls,
    "losses": losses,
    "peers": peers,
    "ways": ways,
    "triangles": triangles,
    "sparse": sparse,
    "times": times,
    "options": options,
    "choice": choice,
    "dq-errors": dq_errors,
    "errors": errors,
    "training": training,
    "engine": engine,
    "pages": pages,
    "invariance": invariance,
    "reproducible": reproducible,
    "limits": limits,
    "step": step,
    "step-speed": step_speed,
    "steps": steps,
    "files": files,
}
TABLE = re.compile(r"(<!-- table: (\S+)(.*?) -->\n).*?(<!-- end\b)", re.S)
MARKER = re.compile(r"<!-- table: \w")


def filled(path: pathlib.Path, used: set[str]) -> str:
    """Return a file's text as the results want it; adds the names of its tables to `used`."""

    def table(match):
        start, name, arguments, end = match.groups()
        used.add(name)
        return start + made(name, arguments) + "\n" + end

    def made(name, arguments):
        try:
            return TABLES[name](*arguments.split())
        except KeyError as error:
            raise UserError(f"{path.name}: there is no table {name!r}: {error}.") from error

    text = path.read_text(encoding="utf-8")
    markers = len(MARKER.findall(text))
    text, tables = TABLE.subn(table, text)
    if tables != markers:
        raise UserError(f"{path.name}: each marker must have its end.")
    return text


def stale() -> Iterator[tuple[pathlib.Path, str]]:
    """Yield the documents whose text would change, and that text."""
    used: set[str] = set()
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        text = filled(path, used)
        if text != path.read_text(encoding="utf-8"):
            yield path, text
    if unused := TABLES.keys() - used:
        raise UserError(f"a document must show each table; none shows {sorted(unused)}.")


def stale_figures() -> Iterator[tuple[pathlib.Path, Callable[[], None]]]:
    """Yield the figures that show other numbers, as is written into them, and how to draw them."""
    for path, (lines, module) in FIGURES.items():
        if not path.exists() or module.about(lines()).encode() not in path.read_bytes():
            yield path, functools.partial(module.save, lines(), path)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    changed = []
    for path, text in stale():
        changed.append(path.relative_to(ROOT).as_posix())
        if not check:
            path.write_text(text, encoding="utf-8")
    for path, draw in stale_figures():
        changed.append(path.relative_to(ROOT).as_posix())
        if not check:
            draw()
    if check and changed:
        raise UserError(
            f"docs/results say otherwise; run scripts/maintenance/make_tables.py: {changed}."
        )
    for name in changed:
        print(name)


if __name__ == "__main__":
    main()
