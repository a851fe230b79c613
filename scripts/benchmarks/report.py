"""Reports of a run's records: a line of text for each, a table in Markdown, and plots."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks import overview, results
from scripts.benchmarks.peers import OURS, PEERS
from scripts.benchmarks.shapes import DIRECTIONS, WITH, short
from scripts.command import UserError, why


def line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of text."""
    start = f"{record['shape']:36} {record['pass']:8} {record['implementation']:16}"
    if "unserved" in record:
        return f"{start} not served: {record['unserved']}"
    if "red" in record:
        wrong = ", ".join(f"{name} {error:.1e}" for name, error in record["red"].items())
        return f"{start} WRONG, not timed: {wrong} (allowed {record['allowed']:.1e})"
    digits = 1 if record["tflops"] >= 1 else 4
    text = f"{start} {record['ms']['median']:9.3f} ms {record['tflops']:7.{digits}f} TFLOP/s"
    if record["T"] == 1:
        text += f" {record['tb_per_s']:5.2f} TB/s"
    text += f"  error {max(record['errors'].values()):.1e}"
    if "ratio" in record and record["implementation"] != OURS:
        text += "  ours {median:5.2f}x ({min:.2f}..{max:.2f})".format(**record["ratio"])
    if "sustained" in record and record["clocks"]:
        clocks = record["clocks"]
        text += f"  {clocks['clocks.sm']:.0f} MHz {clocks['power.draw.instant']:.0f} W"
    return text


def load(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the records of a file; a later one replaces an earlier one of the same measurement.

    Raises:
        UserError: The file cannot be read, or holds no records.
    """
    try:
        lines = results.load(path)
    except ValueError as error:
        if isinstance(error, UnicodeError):
            raise _unread(path, error) from error
        raise UserError(
            f"{path} must have a record that --json wrote in each line; got {error}. Remove the "
            "line, if it is one cut short, or name another file."
        ) from error
    except OSError as error:
        raise _unread(path, error) from error
    return list({key(record): record for record in lines}.values())


def _unread(path: pathlib.Path, error: OSError | UnicodeError) -> UserError:
    return UserError(f"A file that --json wrote must be named; got {path}: {why(error)}.")


def key(record: Mapping[str, Any]) -> tuple:
    """Return the key of a measurement."""
    config = json.dumps(record["config"], sort_keys=True)
    names = ("shape", "pass", "implementation")
    return *(record[name] for name in names), config, mode(record)


def mode(record: Mapping[str, Any]) -> str:
    """Return the way of timing."""
    return "sustained" if "sustained" in record else "in bursts"


def _timed(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    timed = [r for r in records if "tflops" in r]
    if not timed:
        raise UserError("The file must have measurements of these --peers; got none.")
    return timed


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: for each way of timing a row for each pass and case.

    Our times are at the greatest T. A ratio is our speed relative to a peer: the geometric
    mean over T, with the worst T in brackets. Cases with an option also have the ratio of our times
    with and without the option.
    """
    timed = _timed(records)
    modes = {name: [r for r in timed if mode(r) == name] for name in map(mode, timed)}
    return "\n\n".join(f"{name}\n\n" * (len(modes) > 1) + _table(modes[name]) for name in modes)


def _table(timed: Sequence[Mapping[str, Any]]) -> str:
    peers = [
        name for name in PEERS if any(r["implementation"] == name for r in timed) and name != OURS
    ]
    lines = [
        "| | T | ours, TFLOP/s at the longest |" + "".join(f" / {name} |" for name in peers),
        "|---" * (3 + len(peers)) + "|",
    ]
    ms = {
        (r["pass"], r["case"], r["S"]): r["ms"]["median"]
        for r in timed
        if r["implementation"] == OURS
    }
    for direction in DIRECTIONS:
        for case in dict.fromkeys(r["case"] for r in timed):
            row = [r for r in timed if r["pass"] == direction and r["case"] == case]
            ours = sorted((r for r in row if r["implementation"] == OURS), key=lambda r: r["S"])
            if not ours:
                continue
            lengths = ", ".join(short(r["S"]) for r in ours)
            speed = f"{ours[-1]['tflops']:.0f}"
            if ours[-1]["T"] == 1:
                speed = f"{ours[-1]['tb_per_s']:.2f} TB/s"
            without = ms.get((direction, case.partition(WITH)[0], ours[-1]["S"]))
            if WITH in case and without:
                speed += f", {ours[-1]['ms']['median'] / without:.2f}x the time without"
            cells = [
                _ratio_cell(
                    {
                        r["S"]: r["ratio"]["median"]
                        for r in row
                        if r["implementation"] == name and "ratio" in r
                    }
                )
                for name in peers
            ]
            lines.append(f"| {direction} {case} | {lengths} | {speed} |" + "".join(cells))
    return "\n".join(lines)


def _ratio_cell(ratios: Mapping[int, float]) -> str:
    if not ratios:
        return " |"
    mean = statistics.geometric_mean(ratios.values())
    worst = min(ratios, key=lambda length: ratios[length])
    if len(ratios) == 1:
        return f" {mean:.2f} |"
    return f" {mean:.2f} ({ratios[worst]:.2f} at {short(worst)}) |"


def plot(records: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Plot bars for each pass and case, speed over T, and an overview; return the files."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install -e '.[bench]'.") from error
    timed = _timed(records)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out-dir must be a folder, or a new one; got {folder}: {why(error)}."
        ) from error
    bursts, sustained = ([r for r in timed if ("sustained" in r) == is_so] for is_so in (0, 1))
    files = _plot(bursts, folder, "", "") if bursts else []
    return files + (_plot(sustained, folder, "sustained-", ", sustained") if sustained else [])


def _plot(timed, folder, start, how):
    from matplotlib.figure import Figure

    peers = [name for name in PEERS if any(r["implementation"] == name for r in timed)]
    colours = {name: f"C{n}" if n < 10 else f"C{n - 10}" for n, name in enumerate(peers)}
    colours[OURS] = "black"
    subtitle = f"{timed[0]['device']}, {timed[0]['date'][:10]}{how}"
    files = []

    def save(figure, name):
        files.append(folder / f"{start}{name}.png")
        figure.savefig(files[-1], dpi=150, bbox_inches="tight")

    for direction in DIRECTIONS:
        here = [r for r in timed if r["pass"] == direction]
        cases = list(dict.fromkeys(r["case"] for r in here))
        for case in cases:
            speed = {(r["implementation"], r["S"]): r["tflops"] for r in here if r["case"] == case}
            lengths = sorted({length for _, length in speed})
            present = [name for name in peers if any(peer == name for peer, _ in speed)]
            figure = Figure(figsize=(2 + 1.6 * len(lengths), 3.2))
            axes = figure.add_subplot()
            width = 0.8 / len(present)
            for n, name in enumerate(present):
                places = [i - 0.4 + (n + 0.5) * width for i in range(len(lengths))]
                heights = [speed.get((name, length), 0) for length in lengths]
                axes.bar(places, heights, width * 0.9, label=name, color=colours[name])
            axes.set_xticks(range(len(lengths)), [short(length) for length in lengths])
            queries = {r["T"] for r in here if r["case"] == case}
            below = "S" if queries == {1} else "T"
            _finish(axes, f"{direction} {case}\n{subtitle}", below)
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            save(figure, f"{direction}-{case.replace(' ', '-')}")
        scaled = [case for case in cases if len({r["S"] for r in here if r["case"] == case}) > 1]
        if not scaled:
            continue
        columns = min(3, len(scaled))
        rows = -(-len(scaled) // columns)
        figure = Figure(figsize=(3.6 * columns, 2.8 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(scaled) :]:
            axes.remove()
        for axes, case in zip(grid, scaled, strict=False):
            for name in peers:
                points = sorted(
                    (r["S"], r["tflops"])
                    for r in here
                    if (r["case"], r["implementation"]) == (case, name)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), ".-", label=name, color=colours[name])
            axes.set_xscale("log", base=2)
            ticks = sorted({r["S"] for r in here if r["case"] == case})
            axes.set_xticks(ticks, [short(length) for length in ticks])
            _finish(axes, case, "length")
        handles = {h.get_label(): h for axes in grid[: len(scaled)] for h in axes.lines}
        figure.legend(handles.values(), handles, loc="outside right upper", frameon=False)
        figure.suptitle(f"{direction}, {subtitle}")
        save(figure, f"{direction}-scaling")
    if overview.save(timed, folder / f"{start}overview.png"):
        files.append(folder / f"{start}overview.png")
    return files


def _finish(axes, title, below):
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel(below)
    axes.set_ylabel("TFLOP/s")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
