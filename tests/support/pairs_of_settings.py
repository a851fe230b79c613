"""Rows of settings in which every pair occurs."""

import itertools

import numpy as np
from support import cases


def drawn(name):
    """The options of a case in the table."""
    return cases.BY_NAME[name].options


def option(**options):
    return lambda random, case: options


nothing = option()

# The settings of each argument; the first of each is what a call has that does not mention it.
SETTINGS = {
    "is_causal": [nothing, option(is_causal=True)],
    "local_window_size": [nothing, option(local_window_size=(20, 30))],
    "query_offset": [nothing, drawn("causal, offset for each example"), drawn("positions")],
    "lengths": [nothing, drawn("lengths")],
    "segment_ids": [nothing, drawn("documents in pairs")],
    "mask": [
        nothing,
        drawn("mask of keys"),
        drawn("prefix"),
        drawn("blocks and predicate"),
    ],
    "bias": [nothing, drawn("bias of all examples"), drawn("bias of heads")],
    "logits_soft_cap": [nothing, option(logits_soft_cap=2.0)],
    "sinks": [nothing, drawn("sinks")],
    "alibi_slopes": [nothing, drawn("slopes, offset for each example")],
    "score_mod": [nothing, drawn("score function")],
    "dropout": [nothing, drawn("dropout"), drawn("dropout for all alike, causal")],
    "scale": [nothing, option(scale=-0.4)],
    "dtype": ["float32", "bfloat16"],
    "heads": [(4, 2), (3, 3)],
    "precision": [nothing, option(precision="highest")],
}

# The options of a case that belong to an argument itself.
OWN = {
    "query_offset": {"query_offset", "query_positions", "key_value_positions"},
    "mask": {"mask"},
    "bias": {"bias"},
    "alibi_slopes": {"alibi_slopes"},
    "dropout": {"dropout_rate", "dropout_key", "broadcast_dropout"},
}

# Pairs that cannot be, and what the call then says.
REFUSED = {
    (("is_causal", 1), ("mask", 2)): "`is_causal` must be False with a PrefixLM `mask`",
}


def pairs(row):
    """The pairs of settings in a row, {argument: number of its setting}."""
    return set(itertools.combinations(sorted(row.items()), 2))


def all_pairs(settings):
    every = (
        itertools.product(
            [(a, i) for i in range(len(settings[a]))], [(b, j) for j in range(len(settings[b]))]
        )
        for a, b in itertools.combinations(sorted(settings), 2)
    )
    return set(itertools.chain(*every)) - REFUSED.keys()


def covering(settings):
    """Rows in which every pair occurs: each is the best of a few that take up one that is left."""
    random, left, rows = np.random.default_rng(1), all_pairs(settings), []

    def candidate():
        row = dict(min(left))
        for name in random.permutation([name for name in settings if name not in row]):

            def gain(i, name=str(name)):
                found = pairs(row | {name: i})
                return -1 if found & REFUSED.keys() else len(found & left) + random.random()

            row[str(name)] = max(range(len(settings[name])), key=gain)
        return {name: row[name] for name in settings}

    while left:
        rows.append(max((candidate() for _ in range(30)), key=lambda row: len(pairs(row) & left)))
        left -= pairs(rows[-1])
    return rows


def call_of(row):
    """A case and its problem."""
    chosen = {name: SETTINGS[name][number] for name, number in row.items()}

    def draw(random, case):
        found = {name: x(random, case) for name, x in chosen.items() if callable(x)}
        return {
            name: x
            for argument, options in found.items()
            for name, x in options.items()
            if name in OWN.get(argument, options)
        }

    N, K = chosen["heads"]
    case = cases.Case("pairs", T=37, S=45, N=N, K=K, H=8, V=12, options=draw)
    return case, case.problem(chosen["dtype"])
