"""The schema of docs/results: a line is one measurement, with the same fields in every file.

    device, driver, versions     the GPU and what ran on it; `versions` has "jax" at least
    commit, date                 the commit of the timed code, and the day
    shape, case                  the problem's name, and the row of a table that it belongs to
    B, T, S, N, K, D, V          its sizes, by the letters of the README; V is None if it is D
    causal, dtype                and, where a call has them: window, documents, lengths, option
    pass                         one of `PASSES`
    implementation               a name of `PEERS`: "ours_mosaic", "jax_cudnn", ...
    config                       further settings: tiles, the order of sums, devices, ...
    timer, clocks                the way of timing; the GPU's clocks and power meanwhile, or None

and one of

    ms                           {"median", "min", "n"} of n measurements, possibly more
    red                          the errors because of which it was not timed
    unserved                     the reason for which there is no time
    error                        no time, but the relative error of `result`, by measure_accuracy.py

Further results of a run have fields of their own (`tflops`, `ratio`, `errors`, ...).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
PASSES = ("forward", "backward", "forward and backward", "update")
FIELDS = {
    **dict.fromkeys(("device", "date", "shape", "case", "implementation", "dtype"), str),
    **dict.fromkeys(("B", "T", "S", "N", "K", "D"), int),
    **dict.fromkeys(("versions", "config"), dict),
    "causal": bool,
    "V": int | None,
    "commit": str | None,
    "clocks": dict | None,
}


def problem(record: Any) -> str | None:
    """Return why a value is no line of the results; None if it is one."""
    if not isinstance(record, dict):
        return "it is no object"
    for name, kind in FIELDS.items():
        # Older files lack fields that may be None.
        value = record.get(name)
        too_small = kind is int and isinstance(value, int) and value < 1
        if not isinstance(value, kind) or too_small:
            return f"`{name}` is {value!r}"
    if record.get("pass") not in PASSES:
        return f"`pass` is {record.get('pass')!r}"
    if not isinstance(record["versions"].get("jax"), str):
        return "`versions` lacks jax"
    if sum(name in record for name in ("ms", "red", "unserved", "error")) != 1:
        return "it must have one of `ms`, `red`, `unserved` and `error`"
    spreads = [record[name] for name in ("ms", "ratio") if name in record]
    if not all(isinstance(spread, dict) for spread in spreads):
        return "`ms` and `ratio` must be objects"
    names = "tflops", "tb_per_s", "error"
    numbers = [record[name] for name in names if name in record]
    numbers += [x for spread in spreads for x in spread.values() if x is not None]
    if not all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers):
        return "it has a number that is not positive and finite"
    ms = record.get("ms", {"median": 1.0, "min": 1.0, "n": 1})
    known = [ms[name] for name in ("min", "median") if ms.get(name) is not None]
    if "n" not in ms or not (known or ms.get("mean")) or known != sorted(known):
        return "`ms` must have `median`, `min` and `n`"
    return None


def time(record: Mapping[str, Any]) -> float:
    """Return milliseconds: the median, or the number that older runs recorded."""
    ms = record["ms"]
    return next(ms[x] for x in ("median", "min", "mean") if ms.get(x) is not None)


def load(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a file.

    Raises:
        ValueError: A line does not fit the schema; the message says why.
        OSError, UnicodeError: The file cannot be read.
    """
    records, lines = [], path.read_text(encoding="utf-8").removesuffix("\n")
    for number, text in enumerate(lines.split("\n") if lines else [], 1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if wrong := problem(record):
            raise ValueError(f"{text[:60]!r} in line {number}: {wrong}")
        records.append(record)
    return records


def dump(record: Mapping[str, Any]) -> str:
    """Return a record as a line, with its end.

    Raises:
        ValueError: The record does not fit the schema; the message says why.
    """
    if wrong := problem(record):
        raise ValueError(f"{json.dumps(record)[:60]!r}: {wrong}")
    return json.dumps(record) + "\n"
