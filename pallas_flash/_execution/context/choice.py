"""Chooses the method of context parallelism.

The choice follows from shapes, the number of devices, and the part of the mask that is known while
tracing. docs/scaling.md has the times that the rule comes from.
"""

from typing import NamedTuple

from pallas_flash._problem.problem import Problem

METHODS = "ring", "gather", "heads"
# Bytes of all keys and values up to which each device may hold them.
SMALL = 2**28


class Choice(NamedTuple):
    """A method of context parallelism, and why.

    Attributes:
        method: "ring", "gather" or "heads".
        reason: a sentence.
        refused: why each of the others was not chosen, by name.
    """

    method: str
    reason: str
    refused: dict[str, str]


def choose(problem: Problem, devices: int, asked: str | None, *, keys: bool = True) -> Choice:
    """Return the method for the problem that one device holds.

    Args:
        problem: the device's queries and keys.
        devices: the number of devices that divide the sequence.
        asked: the method that the call names, or None.
        keys: whether devices divide keys and values, too, and not only the queries.

    Raises:
        NotImplementedError: if the named method does not serve the call.
    """
    if problem.symbolic:
        raise NotImplementedError(
            "`query` must have known sizes where its sequence is sharded; got the symbolic sizes "
            f"{', '.join(map(str, problem.symbolic))}. Give each a number, or gather the sequence "
            "before the call."
        )
    if problem.batch_invariant:
        raise NotImplementedError(
            "`batch_invariant` must be False where devices divide the sequence, because they join "
            "sums of its parts; got True. Drop it, or divide the batch or the heads."
        )
    refused = {}
    if not keys:
        why = "Every device has all keys and values, and nothing is sent."
        refused = {"ring": why, "heads": why}
    elif problem.num_heads % devices:
        refused["heads"] = (
            f"Got {problem.num_heads} query heads, which {devices} devices do not divide."
        )
    if asked in refused:
        raise NotImplementedError(
            "`context_parallelism` must be a method that serves the call; got "
            f"{asked!r}. {refused[asked]} Use None, or one of "
            f"{[x for x in METHODS if x not in refused]}."
        )
    if asked is not None:
        others = {x: f"{asked!r} was asked for." for x in METHODS if x != asked}
        return Choice(asked, "asked for.", refused | others)
    if not keys:
        return Choice("gather", refused["ring"], refused)
    method, reason = by_rule(problem, devices, heads="heads" not in refused)
    for name in METHODS:
        if name != method:
            refused.setdefault(name, f"{method!r} comes first for this call.")
    return Choice(method, reason, refused)


def by_rule(p: Problem, devices: int, *, heads: bool) -> tuple[str, str]:
    """Return the method that auto-selection picks, and why.

    Args:
        p: the device's queries and keys.
        devices: the number of devices that divide the sequence.
        heads: whether they divide the query heads.
    """
    causal = [x for x in p.mask.windows if x.high is not None]
    if any(x.positions is not None for x in causal):
        return "ring", "positions are taken for `balanced_order`, where its steps have equal work."
    sides = [(x.low, x.high) for x in causal if x.known]
    if any(low is not None and max(-low, high or 0) <= p.kv_len for low, high in sides):
        return "ring", "the window is no longer than a device's keys, and neighbours alone send."
    if causal and heads:
        return "heads", "devices have equal work; in order of position, others leave some idle."
    # A device receives (n - 1) / n of its rows of q, o, k and v, or n - 1 shards of k and v.
    if heads and p.rows + p.kv_rows * max(1, devices / p.num_kv_heads) < devices * p.kv_rows:
        return "heads", "it sends less than the others."
    size = devices * p.kv_rows * (p.head_dim + p.value_dim) * p.dtype.itemsize
    if size <= SMALL:
        return "gather", f"all keys and values take {size} bytes on every device, at most {SMALL}."
    return "ring", f"all keys and values would take {size} bytes on every device, above {SMALL}."
