"""Cases with few queries, and the ranges of tiles that they share."""

import dataclasses
import itertools

from support import cases


def with_few(case, T=5, **sizes):
    """The case with few queries, many keys, and three heads that share each of two.

    Mostly five queries: what is between kernels is compiled for each shape.
    """
    return dataclasses.replace(case, T=T, S=200, **{"N": 6, "K": 2} | sizes)


# Cases with one array of ids for queries and keys need as many of both.
SERVED = [c for c in cases.CASES if c.name not in ("documents", "documents, causal, long")]

# (start, full_start, full_stop, stop) of up to 5 tiles.
RANGES = [x for x in itertools.product(range(6), repeat=4) if list(x) == sorted(x)]
