# ruff: noqa
"""Writes the result files that are in use again, in the one schema of scripts/benchmark/results.py.

    python docs/results/convert.py    # once, from the root of the repository

Fields are renamed and moved; no measured value changes, which is asserted at the end. What this
leaves behind goes to archive/ as it is.
"""

import json
import pathlib
import re
import statistics

HERE = pathlib.Path(__file__).parent
OURS = {
    "mosaic": "ours_mosaic",
    "triton": "ours_triton",
    "cudnn": "jax_cudnn",
    "cuDNN": "jax_cudnn",
}
IN_ORDER = {"reproducible": True}
OPTIONS = {
    "alibi": "ALiBi",
    "traced scale": "scale",
    "scale8": "scale",
    "bias 16 bits": "bias",
    "bias full": "bias",
    "bias 32 bits": "float32 bias",
    **{x: x for x in ("mask array", "soft cap", "sinks", "dropout")},
    **{x: x for x in ("score function", "predicate", "blocks")},
}
# Of the names of calls, those that have a kind; others have other shapes.
CALL = re.compile(
    r"(?P<what>full|causal|window ?\d+(?:, grouped)?|(?:lengths(?: from half)?|mask array|soft cap|"
    r"sinks|dropout|score function|predicate|blocks|alibi|traced scale|scale8|bias full|"
    r"bias \d\d bits)(?:,? causal)?|documents.*?|T3000 causal)"
    r" (?P<D>\d+)(?:/(?P<V>\d+))?(?: T=?(?P<T>\d+))?"
)
KIND = {"ALiBi": "slopes", "bias": "bias in 16 bits", "float32 bias": "bias"}


def read(name):
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def write(name, records):
    (HERE / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    print(name, len(records))


def of_bench(name):
    """The lines that bench_attention.py wrote."""
    for r in read(name):
        r = {"implementation" if key == "peer" else key: x for key, x in r.items()}
        r["config"] = {}
        r.setdefault("clocks", None)
        if "ms" in r:
            rounds = r.get("ratios") or r.get("sustained", {}).get("rounds")
            r["ms"]["n"] = len(rounds) if rounds else None
        yield r


def about(r):
    """Where and when a line was measured."""
    more = {key: r[key] for key in ("driver", "tile") if key in r}
    return {
        "device": r["device"],
        "versions": {"jax": r["jax"]},
        "commit": r["commit"],
        "date": r["date"],
        "clocks": None,
        **more,
    }


def sizes(B, T, N, D, V=None, K=None, **more):
    return {"B": B, "T": T, "S": T, "N": N, "K": K or N, "D": D, "V": V, **more}


def problem(call):
    """The fields of a call by its name, or None where it has no kind."""
    match = CALL.fullmatch(call)
    if match is None:
        return None
    what, D, V = match["what"], int(match["D"]), match["V"]
    T = int(match["T"] or re.match(r"T(\d+)", call)[1])
    window = re.match(r"window ?(\d+)", what)
    documents = re.match(r"documents(?: of (\d+)| ?(\d+))?", what)
    option = next((x for name, x in OPTIONS.items() if what.startswith(name)), None)
    return {
        "shape": call,
        "case": call.removesuffix(f" T{T}").removesuffix(f" T={T}"),
        **sizes(
            max(1, 16384 // T), T, 2048 // D, D, V and int(V), 4 if "grouped" in what else None
        ),
        "causal": "causal" in what or bool(window) or bool(documents),
        "window": window and int(window[1]),
        "documents": documents
        and (T // int(documents[1]) if documents[1] else int(documents[2] or 0) or True),
        "lengths": what.startswith("lengths"),
        "option": option,
        "dtype": "bfloat16",
    }


def kinds(p):
    if p["lengths"]:
        return ["ranges", "lengths"]
    if p["window"]:
        return ["ranges"]
    if p["documents"]:
        return ["documents"]
    if p["option"]:
        return [KIND.get(p["option"], p["option"])]
    return ["causal" if p["causal"] else "full"]


def spread(ms, timed):
    rounds = re.search(r"(least|best|median) of (\d+) rounds", timed)
    if rounds is None:
        return {"median": ms, "min": None, "n": None}
    least = rounds[1] != "median"
    return {"median": None if least else ms, "min": ms if least else None, "n": int(rounds[2])}


def lines_of(r, p, names):
    """A line for each of these names in `ms`."""
    for name in names:
        first, *how = name.split(", ")
        yield {
            **p,
            "pass": r["pass"].split()[0],
            "implementation": OURS[first],
            "config": IN_ORDER if how == ["reproducible"] else {},
            "timer": r["timed"],
            "ms": spread(r["ms"][name], r["timed"]),
            **about(r),
        }


def of_choice():
    """The times by which an implementation is chosen: where there are several, the latest."""
    later = {}  # (pass, kind, size, length): name of the file and the rows, the last of each call.
    optional = {
        (r["pass"], KIND.get(r["option"], r["option"]), r["D"], r["T"])
        for r in read("h200-2026-11-24-options-sustained.jsonl")
        if r["option"] and "ms" in r
    }
    between = []
    for file in ("22-forward", "22-backward", "26-choice"):
        for name in ("mosaic", "mosaic, reproducible"):
            last = {}
            for r in read(f"h200-2026-11-{file}.jsonl"):
                if name in r["ms"]:
                    last[r["pass"], r["call"]] = r
            for r in last.values():
                p = problem(r["call"])
                if p is None:
                    continue
                if p["V"] or p["D"] not in (64, 128, 256):
                    if file == "26-choice" and kinds(p)[0] in ("full", "causal"):
                        between.append((r, p, name))
                    continue
                for kind in kinds(p):
                    key = r["pass"], kind, p["D"], p["T"], name
                    if key[:-1] in optional and name == "mosaic":
                        continue
                    if later.get(key, [""])[0] != file:
                        later[key] = [file]
                    later[key].append((r, p, name))
    wanted = [x for key, (_, *rows) in later.items() for x in rows] + between
    found = {}
    for r, p, name in wanted:
        entry = found.setdefault(json.dumps(r), (r, p, {}))
        entry[2][name] = True
    for r, p, names in found.values():
        others = [x for x in ("triton", "cudnn") if x in r["ms"]]
        yield from lines_of(r, p, [*names, *others])
    for r in read("h200-2026-11-22-dbias.jsonl"):
        axes, mask, D, T = re.fullmatch(r"bias \[(.*)\] (\w+) (\d+) T(\d+)", r["call"]).groups()
        D, T = int(D), int(T)
        for name in r["ms"]:
            first, *how = name.split(", ")
            without = how == ["without dbias"]
            p = {
                "shape": r["call"] + " without dbias" * without,
                "case": r["call"].removesuffix(f" T{T}") + " without dbias" * without,
                **sizes(16384 // T, T, 2048 // D, D),
                "causal": mask == "causal",
                "option": "bias" if without else "trained bias",
                "bias_axes": axes,
                "dtype": "bfloat16",
            }
            [line] = lines_of(r, p, [name])
            yield line


def of_shared_queries():
    for r in read("h200-2026-11-26-variants.jsonl"):
        if r["experiment"] != "queries of a head shared out":
            continue
        mask, D, N, T = re.fullmatch(r"(\w+) (\d+), (\d+) heads, T(\d+)", r["call"]).groups()
        for name, turns in r["ms"].items():
            yield {
                "shape": r["call"],
                "case": r["call"].removesuffix(f", T{T}"),
                **sizes(1, int(T), int(N), int(D)),
                "causal": mask == "causal",
                "dtype": "bfloat16",
                "pass": r["pass"],
                "implementation": OURS.get(name, "ours_mosaic"),
                "config": {"programs_of_a_key_tile": int(name)} if name.isdigit() else {},
                "timer": r["timed"],
                "ms": {"median": statistics.median_low(turns), "min": min(turns), "n": len(turns)},
                "turns_ms": turns,
                **about(r),
            }


def of_training():
    names = {"mosaic": "ours_mosaic", "triton": "ours_triton", "cudnn": "jax_cudnn"}
    for day in ("21", "26"):
        for r in read(f"h200-2026-11-{day}-train.jsonl"):
            kept = ("loss", "val_loss", "tokens_per_update", "tokens_per_second", "mfu")
            kept += ("ms_by_40_steps",)
            where = ("command", "run", "step", "steps")
            yield {
                "shape": "gpt2-small",
                "case": "gpt2-small",
                **sizes(32, 1024, 12, 64),
                "causal": True,
                "dtype": "bfloat16",
                "pass": "update",
                "implementation": names[r["attention"]],
                "config": {key: r[key] for key in where if key in r},
                "timer": "train_gpt.py: host clock, mean of the updates since the last look",
                "ms": {"mean": r["ms"], "median": None, "min": None, "n": None},
                **{key: r[key] for key in kept if key in r},
                **about(r),
            }


def numbers(x):
    """All measured numbers of a JSON value."""
    if isinstance(x, dict):
        return [y for value in x.values() for y in numbers(value)]
    if isinstance(x, list):
        return [y for value in x for y in numbers(value)]
    return [x] if isinstance(x, float) else []


BENCH = {
    "h200": "h200-2026-11-26-sustained",
    "h100": "h100-2026-11-26-sustained",
    "h200-triton": "h200-2026-11-21",
    "h200-options": "h200-2026-11-24-options-sustained",
    "h200-small-calls": "h200-2026-11-26-few-programs",
}
OTHERS = {
    "h200-choice": (of_choice, ["22-forward", "22-backward", "26-choice", "22-dbias"]),
    "h200-shared-queries": (of_shared_queries, ["26-variants"]),
    "h200-training": (of_training, ["21-train", "26-train"]),
}
LEFT = [
    "h200-2026-11-2?-*.jsonl",
    "h200-2026-11-21-*.png",
    "h100-2026-11-22.jsonl",
    "h200-x?-2026-11-22.jsonl",
]

for new, old in BENCH.items():
    before, after = read(f"{old}.jsonl"), list(of_bench(f"{old}.jsonl"))
    assert list(map(numbers, before)) == list(map(numbers, after))
    write(f"{new}.jsonl", after)
for new, (make, old) in OTHERS.items():
    after = list(make())
    measured = {x for day in old for x in numbers(read(f"h200-2026-11-{day}.jsonl"))}
    assert set(numbers(after)) <= measured, set(numbers(after)) - measured
    write(f"{new}.jsonl", after)

(HERE / "archive").mkdir(exist_ok=True)
for old in BENCH.values():
    (HERE / f"{old}.jsonl").unlink()
for pattern in LEFT:
    for path in sorted(HERE.glob(pattern)):
        path.rename(HERE / "archive" / path.name)
(HERE / "h200-2026-11-26-sustained-overview.png").rename(HERE / "h200-overview.png")
