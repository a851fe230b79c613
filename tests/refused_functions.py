"""Rows of functions, masks, dropout and gradients that are refused; see `refusals`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from calls import f32, i32, inputs, scaled_by_head
from refusals import Row
from test_no_gradient import with_slopes

import pallas_flash
from pallas_flash import BlockMask, Predicate, PrefixLM, Segments


class Unhashable:
    """A function that could be compiled in only once for each of its values."""

    __hash__ = None

    def __call__(self, *at):
        return at[-1] >= at[-2]


TABLE = jnp.arange(12.0).reshape(3, 4)


# What is wrong with a function: itself, its operands, the error. The functions take scores and
# indices; a Predicate's is given zeros for scores.
FUNCTIONS = {
    "no function": (3, (), "must be a function of the indices b, h, q_pos and k_pos; got int 3."),
    "unhashable": (Unhashable(), (), "must be hashable, because it is compiled in; got Unhashable"),
    "raises": (
        lambda s, *at: {}["name"],
        (),
        "followed by 0 operands; got KeyError: 'name'. Use elementwise jax.numpy",
    ),
    "of too few arguments": (lambda s, b, h, q: s, (), "got TypeError: "),
    "without a parameter for its operand": (
        lambda s, b, h, q, k: s,
        (f32(3),),
        "followed by 1 operands; got TypeError: ",
    ),
    "decides by a value": (
        lambda s, b, h, q, k: s if b > h else -s,
        (),
        "got TracerBoolConversionError: ",
    ),
    "of too few indices": (
        lambda s, b, h, q, k, table: s + table[q],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "of a slice": (
        lambda s, b, h, q, k, table: s + table[h, :2],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "of floating-point indices": (
        lambda s, b, h, q, k, table: s + table[h, q * 1.0],
        (TABLE,),
        "got IndexError: an operand of shape (3, 4) must be indexed by 2 integers",
    ),
    "with an array of its own": (
        lambda s, b, h, q, k: s + TABLE[0, 0],
        (),
        "must read arrays from its operands; got one that it made or closes over, an array of "
        "float32 with shape (3, 4). Pass it as an operand",
    ),
    "returns nothing": (lambda s, *at: None, (), "must return one array; got NoneType None."),
    "returns two arrays": (lambda s, *at: (s, s), (), "must return one array; got tuple ("),
}


def bad_score_functions():
    for id, (fn, operands, fragment) in FUNCTIONS.items():
        yield Row(
            f"score function: {id}",
            lambda fn=fn, operands=operands: {"score_fn": fn, "score_operands": operands},
            TypeError,
            fragment,
        )
    for id, fn, got in (
        ("another dtype", lambda s, *at: s.astype(jnp.bfloat16), "bfloat16 of shape (2, 3)"),
        ("ints", lambda s, b, h, q, k: q - k, "int32 of shape (2, 3)"),
        ("another shape", lambda s, *at: s[:, :2], "float32 of shape (2, 2)"),
        ("one more axis", lambda s, *at: s[None], "float32 of shape (1, 2, 3)"),
        ("a sum", lambda s, *at: s.sum(), "float32 of shape ()"),
        ("a number", lambda s, *at: 1.0, "float32 of shape ()"),
    ):
        yield Row(
            f"score function that returns {id}",
            lambda fn=fn: {"score_fn": fn},
            TypeError,
            "`score_fn` must return scores of the shape and dtype that it is given; got "
            f"{got} for float32 of shape (2, 3).",
        )
    yield Row(
        "operands without a function",
        lambda: {"score_operands": (f32(3),)},
        ValueError,
        "`score_operands` must be empty without a `score_fn`; got 1 arrays.",
    )


def bad_operands():
    def of_score(operands):
        return {"score_fn": lambda s, b, h, q, k, *xs: s, "score_operands": operands}

    def of_predicate(operands):
        return {"mask": Predicate(lambda b, h, q, k, *xs: q >= k, operands)}

    for name, call in (("score_operands", of_score), ("Predicate.operands", of_predicate)):
        for id, operands, fragment in (
            ("an array", f32(3), "` must be a tuple of arrays; got an array of float32"),
            ("None", None, "` must be a tuple of arrays; got NoneType None."),
            ("dict", {"x": f32(3)}, "` must be a tuple of arrays; got dict "),
            ("list inside", (f32(2), [1.0]), "[1]` must be an array; got list [1.0]."),
            ("number inside", (1.0,), "[0]` must be an array; got float 1.0."),
            ("key inside", (jax.random.key(0),), "[0]` must be real numbers or bools of at most"),
            ("complex", (f32(3) * 1j,), "[0]` must be real numbers or bools of at most 32 bits;"),
        ):
            yield Row(
                f"{name}: {id}",
                lambda call=call, operands=operands: call(operands),
                TypeError,
                f"`{name}{fragment}",
            )
        yield Row(
            f"{name}: empty",
            lambda call=call: call((f32(0),)),
            ValueError,
            f"`{name}[0]` must have at least one element; got shape (0,).",
        )
        for dtype in ("int64", "float64"):
            yield Row(
                f"{name} in {dtype}",
                lambda call=call, dtype=dtype: call((jnp.zeros(3, dtype),)),
                TypeError,
                f"`{name}[0]` must be real numbers or bools of at most 32 bits; got {dtype}.",
                x64=True,
            )


def bad_mask_objects():
    for id, (fn, operands, fragment) in FUNCTIONS.items():
        wrapped = fn if not callable(fn) or id == "unhashable" else of_indices(fn)
        yield Row(
            f"Predicate: {id}",
            lambda fn=wrapped, operands=operands: {"mask": Predicate(fn, operands)},
            TypeError,
            fragment,
        )
    for id, fn, got in (
        ("floats", lambda b, h, q, k: (q - k) * 1.0, "float32 of shape (2, 3)"),
        ("ints", lambda b, h, q, k: q - k, "int32 of shape (2, 3)"),
        ("another shape", lambda b, h, q, k: (q >= k)[:, :2], "bool of shape (2, 2)"),
        ("one more axis", lambda b, h, q, k: (q >= k)[None], "bool of shape (1, 2, 3)"),
    ):
        yield Row(
            f"Predicate that returns {id}",
            lambda fn=fn: {"mask": Predicate(fn)},
            TypeError,
            f"`Predicate.fn` must return a bool for each pair of its indices; got {got} for ",
        )

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
             "`Segments.query` must have shape [B, T] = (2, 5); got (5,)."),
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
        mask(lambda: "text" & PrefixLM(i32(2)), "joined with a string", TypeError,
             "`mask` must be an array; got str 'text'."),
        mask(lambda: block_mask(q_len=6), "BlockMask for other queries", ValueError,
             "`BlockMask.q_len` must be that of the call; got 6 and 5."),
        mask(lambda: block_mask(kv_len=9), "BlockMask for other keys", ValueError,
             "`BlockMask.kv_len` must be that of the call; got 9 and 7."),
        mask(lambda: BlockMask(f32(1, 1, 1, 1)), "BlockMask of floats", TypeError,
             "`BlockMask.some` must be boolean; got float32."),
        mask(lambda: BlockMask([[True]]), "BlockMask of lists", TypeError,
             "`BlockMask.some` must be an array; got list [[True]]."),
        mask(lambda: BlockMask(jnp.ones((3, 2), bool), 2, 4), "BlockMask of rank 2", ValueError,
             "`BlockMask.some` must have shape [B, N, ceil(T / block_q), ceil(S / block_kv)] = "
             "(2, 6, 3, 2), its first two axes possibly 1; got (3, 2)."),
        mask(lambda: BlockMask(jnp.ones((1, 3, 3, 2), bool), 2, 4), "BlockMask by head of keys",
             ValueError, "its first two axes possibly 1; got (1, 3, 3, 2)."),
        mask(lambda: BlockMask(jnp.ones((1, 1, 1, 2), bool), 2, 4), "BlockMask, broadcast",
             ValueError, "its first two axes possibly 1; got (1, 1, 1, 2)."),
        mask(lambda: dataclasses.replace(block_mask(), every=f32(1, 1, 3, 2)),
             "BlockMask with floats for every", TypeError,
             "`BlockMask.every` must be boolean; got float32."),
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
        # What `from_mask` itself refuses.
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
             "(2, 6, 1, 1), its first two axes possibly 1; got (3, 1, 1, 1)."),
    )  # fmt: skip
    yield Row(
        "size of blocks as an array",
        lambda: {"mask": block_mask(block_q=jnp.int32(2))},
        ValueError,
        "`BlockMask.block_q` must be an int of at least 1; got an array of int32 with shape ().",
    )


def of_indices(fn):
    return lambda b, h, q, k, *operands: fn(jnp.float32(0), b, h, q, k, *operands)


def block_mask(q_len=5, kv_len=7, block_q=2):
    made = BlockMask.from_mask(
        jnp.ones((q_len, kv_len), bool), q_len, kv_len, block_q=2, block_kv=4
    )
    return dataclasses.replace(made, block_q=block_q)


def bad_dropout():
    key = jax.random.key(0)
    for rate in ("0.1", None, True, np.True_, [0.1], jnp.float32(0.1), np.array(0.1), 1j):
        yield Row(
            f"dropout rate {rate!r}",
            lambda rate=rate: {"dropout_rate": rate, "dropout_key": key},
            TypeError,
            "`dropout_rate` must be a number; got ",
        )
    yield Row(
        "dropout rate traced",
        lambda: {"dropout_rate": 0.1, "dropout_key": key},
        TypeError,
        "`dropout_rate` must be a number; got an array of float32 with shape (). Pass a Python",
        traced="dropout_rate",
    )
    for rate in (1, 1.0, -0.1, 1.5, float("nan"), float("inf"), 10**400, np.float32(2)):
        yield Row(
            f"dropout rate {rate!r:.20}",
            lambda rate=rate: {"dropout_rate": rate, "dropout_key": key},
            ValueError,
            "`dropout_rate` must be at least 0 and less than 1; got ",
        )
    yield Row(
        "dropout without a key",
        lambda: {"dropout_rate": 0.1},
        ValueError,
        "`dropout_key` must be given with a `dropout_rate`; got None and 0.1.",
    )
    # Also where nothing is dropped.
    for rate in (0.0, 0.1):
        for x in (0, "key", [0, 1]):
            yield Row(
                f"dropout key {x!r}, rate {rate}",
                lambda x=x, rate=rate: {"dropout_rate": rate, "dropout_key": x},
                TypeError,
                f"`dropout_key` must be a jax.random key; got {type(x).__name__} {x!r}.",
            )
        for id, x in (
            ("two", jax.random.split(key)),
            ("two raw", jax.random.split(jax.random.PRNGKey(0))),
            ("raw, too long", jnp.zeros(3, jnp.uint32)),
            ("raw, a scalar", jnp.zeros((), jnp.uint32)),
            ("ints", i32(2)),
            ("floats", np.zeros(2)),
        ):
            yield Row(
                f"dropout key: {id}, rate {rate}",
                lambda x=x, rate=rate: {"dropout_rate": rate, "dropout_key": x},
                TypeError,
                "`dropout_key` must be one jax.random key; got an array of ",
            )


def without_gradient():
    for implementation in ("xla", "interpret"):
        for argument, arguments in (
            ("alibi_slopes", lambda: {"alibi_slopes": f32(6)}),
            (
                "score_operands",
                lambda: {"score_fn": scaled_by_head, "score_operands": (i32(2), f32(6))},
            ),
        ):
            yield Row(
                f"{argument} differentiated by {implementation}",
                lambda arguments=arguments, implementation=implementation: {
                    **arguments(),
                    "implementation": implementation,
                },
                NotImplementedError,
                f"`{argument}` must not be differentiated by '{implementation}', which has no "
                "gradient for it; got a derivative with respect to it. Wrap it in ",
                differentiated=argument,
            )


def other_functions():
    ids = pallas_flash.segment_ids_from_cu_seqlens

    def row(id, function, error, fragment, **arguments):
        return Row(id, lambda: arguments, error, fragment, function=function)

    def tangent_of_the_call(x):
        call = functools.partial(pallas_flash.attention, implementation="xla")
        return jax.jvp(lambda q: call(q, q, q), (x,), (x,))

    yield row(
        "forward mode",
        tangent_of_the_call,
        NotImplementedError,
        "`attention` must be differentiated in reverse mode by 'xla'",
        x=jnp.ones((1, 4, 2, 8)),
    )

    for length, devices, fragment in (
        (20, 4, "`length` must be a multiple of 2 * devices = 8; got 20. Add padding"),
        (0, 4, "`length` must be an int of at least 1; got int 0"),
        (16.0, 4, "`length` must be an int of at least 1; got float 16.0"),
        (16, None, "`devices` must be an int of at least 1; got NoneType None"),
    ):
        yield row(
            f"balanced order of {length} for {devices}",
            pallas_flash.balanced_order,
            ValueError,
            fragment,
            length=length,
            devices=devices,
        )

    for x in ([0, 2], 3, None):
        yield row(
            f"cu_seqlens {x!r}",
            ids,
            TypeError,
            f"`cu_seqlens` must be an array; got {type(x).__name__} ",
            cu_seqlens=x,
            length=5,
        )
    for dtype in ("float32", "uint32", "bool"):
        yield row(
            f"cu_seqlens in {dtype}",
            ids,
            TypeError,
            f"`cu_seqlens` must be int32; got {dtype}.",
            cu_seqlens=jnp.zeros(3, dtype),
            length=5,
        )
    for shape in ((), (0,), (2, 3)):
        yield row(
            f"cu_seqlens of shape {shape}",
            ids,
            ValueError,
            f"`cu_seqlens` must have shape [documents + 1]; got {shape}.",
            cu_seqlens=i32(*shape),
            length=5,
        )
    for ends in ((1, 3), (0, 3, 2), (0, 6), (-1, 2)):
        yield row(
            f"cu_seqlens {ends}",
            ids,
            ValueError,
            "`cu_seqlens` must rise from 0 to at most length = 5; got an array of int32 with shape "
            f"({len(ends)},) from {ends[0]} to {ends[-1]}.",
            cu_seqlens=np.array(ends, np.int32),
            length=5,
        )
    for length in (-1, 2.0, None):
        yield row(
            f"length {length}",
            ids,
            ValueError,
            "`length` must be an int of at least 0; got ",
            cu_seqlens=i32(1),
            length=length,
        )
    valid = dict(key=jax.random.key(0), shape=(1, 2, 3, 4), rate=0.1)
    for id, error, fragment, changed in (
        (
            "shape of rank 3",
            TypeError,
            "`shape` must be a tuple of four ints",
            {"shape": (1, 2, 3)},
        ),
        ("shape as an int", TypeError, "[B, N, T, S]; got int 3.", {"shape": 3}),
        ("shape of floats", ValueError, "`shape[2]` must be an int of", {"shape": (1, 2, 3.0, 4)}),
        ("negative shape", ValueError, "of at least 0; got int -1.", {"shape": (1, -1, 3, 4)}),
        ("rate of 1", ValueError, "`rate` must be at least 0 and less than 1; got", {"rate": 1.0}),
        ("rate as an array", TypeError, "`rate` must be a number; got", {"rate": jnp.ones(())}),
        ("no key", TypeError, "`key` must be a jax.random key; got NoneType", {"key": None}),
        ("no key, rate 0", TypeError, "`key` must be a jax.", {"key": 3, "rate": 0.0}),
        ("two keys", TypeError, "`key` must be one jax.", {"key": jax.random.split(valid["key"])}),
    ):
        yield row(
            f"dropout_mask: {id}", pallas_flash.dropout_mask, error, fragment, **valid | changed
        )

    yield row(
        "slopes differentiated after the queries",
        lambda query, slopes: jax.jvp(
            lambda slopes: jax.grad(with_slopes)(query, slopes), (slopes,), (slopes,)
        ),
        NotImplementedError,
        "`alibi_slopes` must not be differentiated by 'xla', which has no gradient for it",
        query=inputs()["query"],
        slopes=f32(6),
    )
