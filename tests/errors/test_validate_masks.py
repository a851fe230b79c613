"""Mask objects that are refused, alone and joined: `PrefixLM`, `Segments`, `BlockMask`."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.calls import Row, assert_each, f32, i32

from pallas_flash.masks import (
    BlockCausal,
    BlockMask,
    Chunked,
    Dilated,
    Neighborhood,
    Predicate,
    PrefixLM,
    Segments,
    SharedPrefix,
    Tree,
)


def block_mask(q_len=5, kv_len=7, block_q=2):
    made = BlockMask.from_mask(
        jnp.ones((q_len, kv_len), bool), q_len, kv_len, block_q=2, block_kv=4
    )
    return dataclasses.replace(made, block_q=block_q)


def bad_mask_objects():
    def mask(make, id, error, fragment, **other):
        return Row(id, lambda: {"mask": make(), **other}, error, fragment)

    allowed = jnp.ones((5, 7), bool)
    yield from (
        mask(lambda: PrefixLM(i32(2)), "PrefixLM and causal", ValueError,
             "`is_causal` must be False with a PrefixLM `mask`; got True.", is_causal=True),
        mask(lambda: allowed & PrefixLM(i32(2)), "PrefixLM joined and causal", ValueError,
             "`is_causal` must be False with a PrefixLM `mask`; got True.", is_causal=True),
        mask(lambda: PrefixLM(3), "prefix as int", TypeError,
             "`PrefixLM.prefix_lengths` must be an array; got int 3."),
        mask(lambda: PrefixLM([3, 4]), "prefix as list", TypeError,
             "`PrefixLM.prefix_lengths` must be an array; got list [3, 4]."),
        mask(lambda: PrefixLM(f32(2)), "prefix of floats", TypeError,
             "`PrefixLM.prefix_lengths` must be int32; got float32."),
        mask(lambda: PrefixLM(i32(3)), "prefixes of another batch", ValueError,
             "`PrefixLM.prefix_lengths` must have shape [B] = (2,); got (3,)."),
        mask(lambda: Segments(i32(2, 5)), "Segments of queries for T != S", ValueError,
             "`Segments.key_value` must be given where T and S differ; got None with T=5 and S=7."),
        mask(lambda: Segments(i32(5), i32(7)), "Segments without a batch axis", ValueError,
             "`Segments.query` must have shape [B, T] = (2, 5); got (5,). Give one number for"),
        mask(lambda: Segments(i32(2, 5), f32(2, 7)), "Segments of floats", TypeError,
             "`Segments.key_value` must be int32; got float32."),
        mask(lambda: Segments([[0] * 5], i32(2, 7)), "Segments of lists", TypeError,
             "`Segments.query` must be an array; got list "),
        mask(lambda: PrefixLM(i32(2)) & f32(5, 7), "joined with floats", TypeError,
             "`mask` must be boolean, True where a query may attend; got float32."),
        mask(lambda: np.ones((7, 5), bool) & PrefixLM(i32(2)), "joined with an array", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (2, 6, 5, 7); got mask.shape=(7, 5)."),
        mask(lambda: PrefixLM(i32(2)) & True, "joined with a bool", TypeError,
             "`mask` must be an array; got bool True."),
        mask(lambda: max, "function", TypeError, "`mask` must be an array or a mask object; got "
             "builtin_function_or_method <built-in function max>. Wrap a function in `pallas_fl"),
        mask(lambda: Predicate(lambda i, j: i >= j), "function of two indices", TypeError,
             "Give it b, h, q_pos, k_pos and a parameter for each operand."),
        mask(lambda: PrefixLM, "class", TypeError, "Pass an object of it: `PrefixLM(...)`."),
        mask(lambda: [PrefixLM(i32(2)), block_mask()], "list of masks", TypeError,
             "Write `a & b` or `a | b`, which join masks."),
        mask(lambda: np.ones((2, 7), bool), "array by batch element and key", ValueError,
             "got mask.shape=(2, 7). Write `mask[:, None, None]`, if it has"),
        mask(lambda: np.ones((2, 5, 7), bool), "array by batch element, query and key", ValueError,
             "got mask.shape=(2, 5, 7). Write `mask[:, None]`, if all heads"),
        mask(lambda: "text" & PrefixLM(i32(2)), "joined with a string", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: block_mask(q_len=6), "BlockMask for other queries", ValueError,
             "`BlockMask.q_len` must be that of the call; got 6 and 5."),
        mask(lambda: block_mask(kv_len=9), "BlockMask for other keys", ValueError,
             "`BlockMask.kv_len` must be that of the call; got 9 and 7."),
        mask(lambda: BlockMask(f32(1, 1, 1, 1)), "BlockMask of floats", TypeError,
             "`BlockMask.some` must be bool; got float32."),
        mask(lambda: BlockMask([[True]]), "BlockMask of lists", TypeError,
             "`BlockMask.some` must be an array; got list [[True]]."),
        mask(lambda: BlockMask(jnp.ones((3, 2), bool), 2, 4), "BlockMask of rank 2", ValueError,
             "`BlockMask.some` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] = "
             "(2, 6, 3, 2), its first two axes possibly 1; got (3, 2) with block_q=2 and "
             "block_kv=4. Use a table for this call"),
        mask(lambda: BlockMask(jnp.ones((1, 3, 3, 2), bool), 2, 4), "BlockMask by head of keys",
             ValueError, "its first two axes possibly 1; got (1, 3, 3, 2) with"),
        mask(lambda: BlockMask(jnp.ones((1, 1, 1, 2), bool), 2, 4), "BlockMask, broadcast",
             ValueError, "its first two axes possibly 1; got (1, 1, 1, 2) with"),
        mask(lambda: dataclasses.replace(block_mask(), every=f32(1, 1, 3, 2)),
             "BlockMask with floats for every", TypeError,
             "`BlockMask.every` must be bool; got float32."),
        mask(lambda: dataclasses.replace(block_mask(), mask=None), "BlockMask without a mask",
             ValueError, "must be given together; got `every` alone. Use `BlockMask.from_mask`"),
        mask(lambda: dataclasses.replace(block_mask(), every=None), "BlockMask without every",
             ValueError, "must be given together; got `mask` alone. Use `BlockMask.from_mask`"),
        mask(lambda: dataclasses.replace(block_mask(), mask="text"), "BlockMask of text", TypeError,
             "`mask` must be an array; got str 'text'."),
        *(mask(lambda name=name, x=x: dataclasses.replace(block_mask(), **{name: x}),
               f"BlockMask with {name} = {x!r}", ValueError,
               f"`BlockMask.{name}` must be an int of at least 1; got ")
          for name in ("block_q", "block_kv") for x in (0, -1, 2.0, True, "2")),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7), "BlockMask of a prefix, causal",
             ValueError, "`is_causal` must be False with a PrefixLM", is_causal=True),
        *(mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7),
               f"BlockMask of a prefix, moved by {type(offset).__name__}", ValueError,
               "`query_offset` must be 0, and `query_positions` and `key_value_positions` None, "
               "with a BlockMask made from a PrefixLM",
               query_offset=offset)
          for offset in (3, i32(2))),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(2)), 5, 7),
             "BlockMask of a prefix, of positions", ValueError,
             "whose blocks were found without them; got positions. Pass the PrefixLM itself",
             key_value_positions=i32(1, 7)),
        # Masks with a name, and operators.
        *(mask(lambda make=make, x=x: make(x), f"{name} of {x!r}", ValueError,
               f"`{name}` must be an int of at least 1; got ")
          for name, make in (("Chunked.size", Chunked), ("BlockCausal.size", BlockCausal),
                             ("Dilated.stride", Dilated)) for x in (0, 2.0, True)),
        mask(lambda: BlockCausal(2), "BlockCausal and causal", ValueError,
             "`is_causal` must be False with a BlockCausal `mask`; got True.", is_causal=True),
        mask(lambda: ~(Chunked(2) | PrefixLM(i32(2))), "PrefixLM inside operators, causal",
             ValueError, "`is_causal` must be False with a PrefixLM", is_causal=True),
        mask(lambda: ~(Chunked(2) | f32(5, 7)), "operators with floats", TypeError,
             "`mask` must be boolean, True where a query may attend; got float32."),
        mask(lambda: Chunked(2) | "text", "or with a string", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: SharedPrefix(i32(2, 5)), "SharedPrefix of queries for T != S", ValueError,
             "`SharedPrefix.key_value` must be given where T and S differ; got None"),
        mask(lambda: SharedPrefix(i32(2, 5), f32(2, 7)), "SharedPrefix of floats", TypeError,
             "`SharedPrefix.key_value` must be int32; got float32."),
        mask(lambda: Tree([[0]]), "Tree of lists", TypeError, "`Tree.parents` must be an array"),
        mask(lambda: Tree(f32(2, 5)), "Tree of floats", TypeError,
             "`Tree.parents` must be int32; got float32."),
        mask(lambda: Tree(i32(3, 5)), "Tree of another batch", ValueError,
             "`Tree.parents` must have shape [B, T] = (2, 5), its first axis possibly 1; got (3, "),
        *(mask(lambda x=x: Tree(jnp.full((2, 5), x, jnp.int32)), f"Tree of parents {x}", ValueError,
               "`Tree.parents` must be -1 or the index of an earlier token") for x in (-2, 0, 4)),
        *(mask(lambda: Tree(i32(2, 5) - 1), f"Tree and {name}", NotImplementedError,
               "must be None with a Tree `mask`, which needs the whole tree in its order; got "
               "`query_positions or key_value_positions`.", **{name: i32(1, n)})
          for name, n in (("query_positions", 5), ("key_value_positions", 7))),
        *(mask(lambda x=x: Neighborhood(x, (1,)), f"Neighborhood of {x!r}", TypeError,
               "`Neighborhood.grid` must be a tuple of ints; got ") for x in (7, [7], ())),
        *(mask(lambda x=x: Neighborhood((7,), (x,)), f"Neighborhood of a window {x!r}", ValueError,
               "`Neighborhood.window` must be an int of at least 1; got ") for x in (0, 1.5)),
        *(mask(lambda x=x: Neighborhood((7, 1), x), f"Neighborhood with a window {x}", ValueError,
               "`Neighborhood.window` must have an int for each axis of the grid, not above its "
               f"points; got {x} for a grid of (7, 1).") for x in ((3,), (8, 1), (1, 2))),
        mask(lambda: Neighborhood((2, 3), (1, 1)), "Neighborhood of another length", ValueError,
             "`Neighborhood.grid` must have a point for each key and query; got 6 points for T=5 "
             "and S=7."),
        *(mask(lambda: Neighborhood((7,), (1,)), f"Neighborhood moved by {x}", ValueError,
               f"got 7 points for T=5 and S=7 and query_offset={x}.", query_offset=x)
          for x in (-1, 3)),
        *(mask(lambda: Tree(i32(2, 5) - 1), f"Tree moved by {x}", ValueError,
               "`query_offset` must be the number of keys before the tree of a Tree `mask`, at "
               f"most S - T = 2; got {x}.", query_offset=x) for x in (-1, 3)),
        *(mask(make, f"masks joined by {name}", TypeError, "`mask` must be joined by `&`, `|` and "
               "`~`; got Chunked as a condition")
          for name, make in (("and", lambda: Chunked(2) and Chunked(3)),
                             ("or", lambda: Chunked(2) or Chunked(3)),
                             ("not", lambda: not Chunked(2)))),
        *(mask(make, f"joined masks as conditions, {name}", TypeError, "got a joined mask as a "
               "condition")
          for name, make in (("disjunction", lambda: (Chunked(2) | Chunked(3)) and Chunked(4)),
                             ("conjunction", lambda: (Chunked(2) & Chunked(3)) or Chunked(4)),
                             ("negation", lambda: ~Chunked(2) and Chunked(3)),
                             ("array", lambda: (np.ones((5, 7), bool) | Chunked(2)) or None))),
        *(mask(lambda make=make: BlockMask.from_mask(make(), 5, 7), f"BlockMask of {name}, moved",
               ValueError, "with a BlockMask made from a mask that goes by positions",
               query_offset=2)
          for name, make in (("chunks", lambda: Chunked(2)),
                             ("operators", lambda: ~(Chunked(2) | jnp.ones((5, 7), bool))))),
        # Errors of `from_topk` itself.
        mask(lambda: BlockMask.from_topk([[1.0]], 1), "from_topk of lists", TypeError,
             "`scores` must be an array; got list [[1.0]]."),
        mask(lambda: BlockMask.from_topk(jnp.ones((1, 1, 1, 1), bool), 1), "from_topk of bools",
             TypeError, "`scores` must be floating point, or integers that are numbers of key "
             "blocks; got bool."),
        mask(lambda: BlockMask.from_topk(f32(2, 2), 1), "from_topk of rank 2", ValueError,
             "`scores` must have 4 axes, [B, N, query blocks, key blocks], the first two possibly "
             "1; got shape (2, 2)."),
        *(mask(lambda k=k: BlockMask.from_topk(f32(1, 1, 1, 1), k), f"from_topk of {k}", ValueError,
               "`k` must be an int of at least 1; got ") for k in (None, 0, 1.0)),
        mask(lambda: BlockMask.from_topk(i32(1, 1, 1, 1), 1, kv_len=7), "from_topk with k",
             ValueError, "`k` must be None with numbers of blocks, which are all taken; got int "),
        mask(lambda: BlockMask.from_topk(i32(1, 1, 1, 1)), "from_topk of numbers alone", ValueError,
             "`kv_len` must be given with numbers of blocks, "),
        mask(lambda: BlockMask.from_topk(f32(1, 1, 1, 1), 1, kv_len=9), "from_topk for other keys",
             ValueError, "`BlockMask.kv_len` must be that of the call; got 9 and 7."),
        mask(lambda: BlockMask.from_topk(f32(1, 1, 1, 4), 1, kv_len=99), "from_topk of more blocks",
             ValueError, "`scores` must have a key block for each 64 of 99 keys, 2 in all; got sh"),
        mask(lambda: BlockMask.from_topk(f32(1, 1, 3, 2), 1, block_q=2), "from_topk by blocks",
             ValueError, "(2, 6, 3, 1), its first two axes possibly 1; got (1, 1, 3, 2) with"),
        # Errors of `from_mask` itself.
        *(mask(lambda name=name, x=x: BlockMask.from_mask(**dict(mask=allowed, q_len=5, kv_len=7)
                                                          | {name: x}),
               f"from_mask with {name} = {x!r}", ValueError,
               f"`{name}` must be an int of at least 1; got ")
          for name in ("q_len", "kv_len", "batch", "num_heads", "block_q", "block_kv")
          for x in (0, 2.0, True)),
        *(mask(lambda fn=fn: BlockMask.from_mask(Predicate(fn), 5, 7),
               f"from_mask of a Predicate that asks for {name}", ValueError,
               f"`{name}` must be given for a Predicate that asks for its index; got None.")
          for name, fn in (("batch", lambda b, h, q, k: (k <= q) | (b == 1)),
                           ("num_heads", lambda b, h, q, k: (k <= q) | (h == 1)))),
        mask(lambda: BlockMask.from_mask("text", 5, 7), "from_mask of text", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: BlockMask.from_mask(f32(5, 7), 5, 7), "from_mask of floats", TypeError,
             "`mask` must be boolean, True where a query may attend; got float32."),
        mask(lambda: BlockMask.from_mask(allowed, 7, 5), "from_mask of other lengths", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (1, 1, 7, 5); got mask.shape=(5, 7)."),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 1, 5, 7), bool), 5, 7, batch=2),
             "from_mask for another batch", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (2, 1, 5, 7)"),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 5, 7), bool), 5, 7, num_heads=6),
             "from_mask for other heads", ValueError,
             "`mask` must be broadcastable to [B, N, T, S] = (1, 6, 5, 7)"),
        mask(lambda: BlockMask.from_mask(Segments(i32(3, 5), i32(3, 7)), 5, 7, batch=2),
             "from_mask of Segments of another batch", ValueError,
             "`Segments.query` must have shape [B, T] = (2, 5); got (3, 5)."),
        mask(lambda: BlockMask.from_mask(PrefixLM(i32(3)) & Segments(i32(2, 5), i32(2, 7)), 5, 7),
             "from_mask of two batches", ValueError,
             "`Segments.query` must have shape [B, T] = (3, 5); got (2, 5)."),
        mask(lambda: BlockMask.from_mask(jnp.ones((3, 1, 5, 7), bool), 5, 7),
             "BlockMask of another batch", ValueError,
             "`BlockMask.some` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] = "
             "(2, 6, 1, 1), its first two axes possibly 1; got (3, 1, 1, 1) with"),
    )  # fmt: skip
    yield Row(
        "size of blocks as an array",
        lambda: {"mask": block_mask(block_q=jnp.int32(2))},
        ValueError,
        "`BlockMask.block_q` must be an int of at least 1; got an array of int32 with shape ().",
    )


ROWS = list(bad_mask_objects())
# Wrong kinds, which constructors and operators name before a call.
KINDS = {
    "PrefixLM.prefix_lengths": [lambda: PrefixLM([3]), lambda: PrefixLM(f32(2))],
    "Segments.query": [lambda: Segments("ids"), lambda: Segments(None)],
    "Segments.key_value": [lambda: Segments(i32(2, 5), f32(2, 7))],
    "SharedPrefix.query": [lambda: SharedPrefix((1, 2))],
    "Tree.parents": [lambda: Tree([[0]]), lambda: Tree(f32(2, 5))],
    "Chunked.size": [lambda: Chunked(2.0), lambda: Chunked(0)],
    "BlockCausal.size": [lambda: BlockCausal("2")],
    "Dilated.stride": [lambda: Dilated(None)],
    "Neighborhood.grid": [lambda: Neighborhood(7, (1,)), lambda: Neighborhood([7], (1,))],
    "Neighborhood.window": [lambda: Neighborhood((7,), (1.5,)), lambda: Neighborhood((7,), (9,))],
    "Predicate.fn": [lambda: Predicate(jnp.ones((5, 7), bool)), lambda: Predicate(None)],
    "Predicate.operands": [lambda: Predicate(max, i32(2))],
    "BlockMask.some": [lambda: BlockMask([[True]]), lambda: BlockMask(f32(1, 1, 1, 1))],
    "BlockMask.block_q": [lambda: BlockMask(jnp.ones((1, 1, 1, 1), bool), 2.0)],
    "BlockMask.kv_len": [lambda: BlockMask(jnp.ones((1, 1, 1, 1), bool), kv_len=7.0)],
    "BlockMask.every": [lambda: dataclasses.replace(block_mask(), mask=None)],
    "mask": [lambda: Chunked(2) | "text", lambda: f32(5, 7) & Chunked(2)],
}


def test_error_messages():
    assert_each(ROWS)


@pytest.mark.parametrize("name", KINDS)
def test_kind_is_named_without_a_call(name):
    for make in KINDS[name]:
        with pytest.raises((TypeError, ValueError), match=f"^`{re.escape(name)}`.* must "):
            make()
