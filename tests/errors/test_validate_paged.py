"""`paged_attention`, `paged.append` and `paged.quantize` refuse wrong calls by a sentence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.calls import Row, assert_each, refusal, row_of

import pallas_flash

f32 = jnp.ones


def call(**changes):
    """Arguments of a call with two requests, 7 pages of 16 tokens, and 4 heads on 2."""
    arguments = {
        "query": f32((2, 3, 4, 8)),
        "key_pages": f32((7, 16, 2, 8)),
        "value_pages": f32((7, 16, 2, 8)),
        "key_value_seq_lengths": np.int32([40, 3]),
        "page_indices": np.int32([[0, 5, 6], [3, 9, -1]]),
        "implementation": "xla",
    }
    return arguments | changes


CU = {"query": f32((6, 4, 8)), "cu_seqlens_q": np.int32([0, 3, 6])}
INT8 = jnp.ones((7, 16, 2, 8), jnp.int8)

CALLS = {
    "lists": (dict(query=[1.0]), TypeError, "`query` must be an array; got "),
    "no heads": (dict(query=f32((2, 3, 0, 8))), ValueError, "`query` must have a multiple of the "),
    "no head dim": (
        dict(query=f32((2, 3, 4, 0))),
        ValueError,
        "`key_pages` must have the head dim",
    ),
    "int queries": (dict(query=jnp.ones((2, 3, 4, 8), int)), TypeError, "`query` must be one of "),
    "rank 3 alone": (dict(query=f32((6, 4, 8))), ValueError, "`query` must have shape [R, T, hea"),
    "batch": (dict(query=f32((3, 3, 4, 8))), ValueError, "`query` must have shape [R, T, heads,"),
    "rank 4 ragged": (CU | dict(query=f32((2, 3, 4, 8))), ValueError, "`query` must have shape [t"),
    "rank of pages": (dict(key_pages=f32((7, 2, 8))), ValueError, "`key_pages` must have shape ["),
    "no pages": (dict(value_pages=f32((0, 16, 2, 8))), ValueError, "`value_pages` must have sha"),
    "dtype of pages": (
        dict(key_pages=jnp.ones((7, 16, 2, 8), jnp.float16)),
        TypeError,
        "`key_pages` must have the dtype of `query`, float32, or one of int8, float8_e4m3fn; got f",
    ),
    "sizes": (dict(value_pages=f32((7, 8, 2, 8))), ValueError, "`value_pages` must have the pag"),
    "head dim": (dict(query=f32((2, 3, 4, 4))), ValueError, "`key_pages` must have the head dim"),
    "heads": (dict(query=f32((2, 3, 3, 8))), ValueError, "`query` must have a multiple of the h"),
    "no scales": (dict(key_pages=INT8), ValueError, "`key_scales` must be given with quantised p"),
    "scales": (dict(key_scales=f32(2)), ValueError, "`key_scales` must be None without quantised"),
    "shape of scales": (
        dict(key_pages=INT8, key_scales=f32((7, 16, 2))),
        ValueError,
        "`key_scales` must have shape [P, K, page_size] = (7, 2, 16) or [K] = (2,); got (7, 16, 2)",
    ),
    "dtype of scales": (
        dict(key_pages=INT8, key_scales=f32(2, jnp.bfloat16)),
        TypeError,
        "`key_scales` must be float32; got bfloat16.",
    ),
    "dtype of lengths": (
        dict(key_value_seq_lengths=np.int16([4, 3])),
        TypeError,
        "`key_value_seq_lengths` must be int32; got",
    ),
    "no requests": (
        dict(key_value_seq_lengths=np.int32([])),
        ValueError,
        "`key_value_seq_lengths` must have shape [R] with ",
    ),
    "dtype of pages' indices": (
        dict(page_indices=np.zeros((2, 3), np.uint8)),
        TypeError,
        "`page_indices` must be int32; got uint8.",
    ),
    "rows of pages": (
        dict(page_indices=np.zeros((3, 3), np.int32)),
        ValueError,
        "`page_indices` must have shape [R, pages of a request] = (2, 3); got (3, 3). Give one "
        "number for each page of each request.",
    ),
    "cumulative lengths": (
        CU | dict(cu_seqlens_q=np.int32([0, 3])),
        ValueError,
        "`cu_seqlens_q` must have shape [R + 1] = (3,); got (2,). Give one number for each "
        "request, and the end of the last one.",
    ),
    "decreasing": (
        CU | dict(cu_seqlens_q=np.int32([0, 4, 3])),
        ValueError,
        "`cu_seqlens_q` must not decrease, and must be from 0 to 6, the number of tokens; got ",
    ),
    "beyond the tokens": (
        CU | dict(cu_seqlens_q=np.int32([0, 4, 7])),
        ValueError,
        "`cu_seqlens_q` must not decrease, and must be from 0 to 6, the number of tokens; got ",
    ),
    "long": (
        dict(key_value_seq_lengths=np.int32([49, 3])),
        ValueError,
        "`key_value_seq_lengths` must be from 0 to the room of a request's pages, 48; got 49.",
    ),
    "negative": (
        dict(key_value_seq_lengths=np.int32([4, -3])),
        ValueError,
        "`key_value_seq_lengths` must be from 0 to the ro",
    ),
    "page outside": (
        dict(key_value_seq_lengths=np.int32([40, 17])),
        ValueError,
        "`page_indices` must be from 0 to 6 up to each length; got 9. Give the number of a page of",
    ),
    "page in a window": (
        dict(page_indices=np.int32([[-1, 99, 6], [3, 9, -1]]), local_window_size=6),
        ValueError,
        "`page_indices` must be from 0 to 6 up to each length; got 99. Give the number of a page",
    ),
    "shorter than its tokens": (
        dict(key_value_seq_lengths=np.int32([40, 2])),
        ValueError,
        "`key_value_seq_lengths` must count the new tokens of a request, too, or be 0 where there "
        "is no request; got 2 for 3 new tokens.",
    ),
    "shorter than its ragged tokens": (
        CU | dict(cu_seqlens_q=np.int32([0, 2, 6])),
        ValueError,
        "`key_value_seq_lengths` must count the new tokens of a request, too, or be 0 where there "
        "is no request; got 3 for 4 new tokens.",
    ),
    "soft cap": (dict(logits_soft_cap=-1.0), ValueError, "`logits_soft_cap` must be positive and "),
    "window": (dict(local_window_size=-1), ValueError, "`local_window_size` must not be negative"),
    "sinks": (dict(sinks=f32(2)), ValueError, "`sinks` must have shape [N] = (4,); got (2,)."),
    "flag": (dict(return_lse=1), TypeError, "`return_lse` must be True or False; got "),
    "name": (dict(implementation="cudnn"), ValueError, "`implementation` must be None or one of ("),
    "no name": (dict(implementation=f32(2)), ValueError, "`implementation` must be None or one of"),
    "mosaic": (
        dict(implementation="mosaic"),
        NotImplementedError,
        "`implementation` must be one that serves the call; got 'mosaic'. The kernels in Mosaic "
        "GPU need a GPU of compute capability 9.0 (H100, H200, GH200), and the device is cpu. Use "
        '"xla".',
    ),
    "batch invariance, xla": (
        dict(batch_invariant=True),
        ValueError,
        '`implementation` must be None or "mosaic" with `batch_invariant=True`, because rows of ',
    ),
    "batch invariance, no GPU": (
        dict(batch_invariant=True, implementation=None),
        NotImplementedError,
        "`batch_invariant` must be False where it does not serve the call; got True. The kernels",
    ),
    "batch invariance, scale": (
        dict(batch_invariant=True, scale=f32(())),
        ValueError,
        "`scale` must be None or a number with `batch_invariant=True`; got an array of float32",
    ),
    "batch invariance, flags and a scale": (
        dict(batch_invariant=np.array([True, False]), scale=f32(())),
        TypeError,
        "`batch_invariant` must be True or False; got an array of bool with shape (2,)",
    ),
    "no GPU": (
        dict(implementation="triton"),
        NotImplementedError,
        "`implementation` must be one that serves the call; got 'triton'. The kernels need an NVID",
    ),
    "large": (
        dict(
            query=f32((2, 3, 4, 257)),
            key_pages=f32((7, 16, 2, 257)),
            implementation="interpret",
        ),
        NotImplementedError,
        "`implementation` must be one that serves the call; got 'interpret'. Got a head dim of 257",
    ),
}


NEW = f32((2, 3, 2, 8))
BY_HEAD = {"key_pages": INT8, "value_pages": INT8, "key_scales": f32(2), "value_scales": f32(2)}
APPENDED = {
    "heads of keys": (dict(key=f32((2, 3, 4, 8))), ValueError, "`value` must have the shape of `k"),
    "pages of values": (
        dict(value_pages=f32((7, 16, 2, 4))),
        ValueError,
        "`value` must have the heads and the h",
    ),
    "int keys": (dict(key=jnp.ones_like(NEW, int)), TypeError, "`key` must be one of float16, bf"),
    "dtype of pages": (
        dict(value_pages=f32((7, 16, 2, 8), jnp.bfloat16)),
        TypeError,
        "`value_pages` must have the dtype of `key`, float32, or one of int8, float8_e4m3fn; got b",
    ),
    "length": (
        dict(key_value_seq_lengths=np.int32([49, 3])),
        ValueError,
        "`key_value_seq_lengths` must be from 0 to the room",
    ),
    "short length": (
        dict(key_value_seq_lengths=np.int32([40, 1])),
        ValueError,
        "`key_value_seq_lengths` must count the new ",
    ),
    "page": (
        dict(
            key_value_seq_lengths=np.int32([34, 3]),
            page_indices=np.int32([[-1, 99, 6], [3, 9, -1]]),
        ),
        ValueError,
        "`page_indices` must be from 0 to 6 up to each length; got 99. Give the number of a page",
    ),
    "NaN and int8 by head": (
        dict(value=NEW.at[1, 2].set(jnp.nan), **BY_HEAD),
        ValueError,
        "`value` must have no NaN with int8 pages and a scale for each head, because int8 has none"
        "; got some in token 5. Give a scale",
    ),
}
QUANTISED = {
    "dtype": ((NEW, jnp.int4), "`dtype` must be one of int8, float8_e4m3fn; got int4."),
    "no dtype": ((NEW, "int9"), "`dtype` must be a dtype; got str 'int9'. Pass one such as `jnp."),
    "int pages": ((NEW.astype(int), jnp.int8), "`pages` must be floating point, [.., tokens, K, "),
    "rank": ((NEW[0, 0], jnp.int8), "`pages` must be floating point, [.., tokens, K, H]; got "),
}


def append(**changes):
    arguments = {name: x for name, x in call().items() if name not in ("query", "implementation")}
    return arguments | {"key": NEW, "value": NEW} | changes


def derivative(**arguments):
    q = arguments.pop("query")
    jax.jvp(lambda q: pallas_flash.paged_attention(q, **arguments), (q,), (q,))


def transpose(**arguments):
    q, pages = arguments["query"], arguments.pop("value_pages")
    run = functools.partial(pallas_flash.paged_attention, **arguments)
    jax.linear_transpose(lambda pages: run(value_pages=pages), pages)(q)


def symbolic(**arguments):
    shape = jax.export.symbolic_shape("r, 3, 4, 8")
    jax.eval_shape(
        lambda q: pallas_flash.paged_attention(**arguments | {"query": q}),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )


def paged_limits():
    paged, sizes = pallas_flash.paged_attention, f32(2)
    for id, (changes, error, said) in CALLS.items():
        yield row_of(f"paged {id}", paged, error, said, **call(**changes))
    for id, (changes, error, said) in APPENDED.items():
        yield row_of(f"append {id}", pallas_flash.paged.append, error, said, **append(**changes))
    for id, ((pages, dtype), said) in QUANTISED.items():
        yield row_of(
            f"quantize {id}", pallas_flash.paged.quantize, TypeError, said, pages=pages, dtype=dtype
        )
    yield row_of(
        "quantize nothing",
        pallas_flash.paged.quantize,
        ValueError,
        "`pages` must have no empty axis; got pages.shape=(2, 0, 2, 8).",
        pages=f32((2, 0, 2, 8)),
        dtype=jnp.int8,
    )
    for id, function in (("derivative", derivative), ("transpose", transpose)):
        yield row_of(
            f"paged {id}",
            function,
            NotImplementedError,
            "`paged_attention` must not be differentiated",
            **call(),
        )
    yield row_of(
        "paged with a symbolic size",
        symbolic,
        NotImplementedError,
        "`query` and pages must have known sizes; got symbolic ones",
        **call(),
    )
    float8 = dict.fromkeys(("key_pages", "value_pages"), jnp.zeros(INT8.shape, jnp.float8_e4m3fn))
    scales = {"key_scales": sizes, "value_scales": sizes}
    yield Row(
        "paged float8 on an A100",
        lambda: call(implementation="triton", **float8, **scales),
        NotImplementedError,
        "serves the call; got 'triton'. Got float8_e4m3fn, which needs an NVIDIA GPU of compute "
        "capability 8.9 or more",
        gpu="NVIDIA A100-SXM4-80GB",
        function=paged,
    )


ROWS = list(paged_limits())


def is_refused(row):
    sentence = str(refusal(row))
    assert row.fragment in sentence and sentence.endswith("."), sentence


def test_calls_are_refused():
    assert_each(ROWS, is_refused)


def test_the_call_itself_is_served():
    assert pallas_flash.paged_attention(**call()).shape == (2, 3, 4, 8)
    assert pallas_flash.paged_attention(**call(**CU)).shape == (6, 4, 8)


# Known numbers of a table that no query reads and no token is written to, and numbers that give the
# same results.
UNUSED = {
    "before a window": dict(page_indices=np.int32([[-1, 99, 6], [3, 9, -1]]), local_window_size=5),
    "of no request": dict(
        key_value_seq_lengths=np.int32([40, 0]), page_indices=np.int32([[0, 5, 6], [-1] * 3])
    ),
    "of no new token": CU
    | dict(cu_seqlens_q=np.int32([0, 6, 6]), page_indices=np.int32([[0, 5, 6], [-1] * 3])),
}


@pytest.mark.parametrize("case", UNUSED)
def test_unused_pages_may_be_anything(case):
    """As under `jit`, where nothing is known."""
    arguments = append(**UNUSED[case])
    arguments.pop("query", None), arguments.pop("local_window_size", None)
    if "cu_seqlens_q" in arguments:
        arguments |= {"key": NEW.reshape(6, 2, 8), "value": NEW.reshape(6, 2, 8)}
    for function, given in (
        (pallas_flash.paged_attention, call(**UNUSED[case])),
        (pallas_flash.paged.append, arguments),
    ):
        safe = given | {"page_indices": np.clip(given["page_indices"], 0, 6)}
        got, want = (jax.tree.leaves(function(**x)) for x in (given, safe))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_traced_numbers_are_not_refused():
    arguments = call(key_value_seq_lengths=np.int32([490, -3]))
    static = {"implementation": arguments.pop("implementation")}
    o = jax.jit(lambda x: pallas_flash.paged_attention(**x, **static))(arguments)
    assert o.shape == (2, 3, 4, 8) and not o[1].any()
