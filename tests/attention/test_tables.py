"""Gradients of tables that scores read, slopes and operands of a score function, are dense ones."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, oracle
from support.compare import assert_close, assert_same_bits
from support.described_gpus import described_gpu
from support.judge import SMALL

from pallas_flash import ScoreMod, attention, explain
from pallas_flash._backends import xla
from pallas_flash._jax import compat
from pallas_flash._problem import table_gradients
from pallas_flash._problem.scores import Scores

# No two agree; T and S are no multiples of a tile.
B, T, S, N, K, H, V = 2, 75, 91, 4, 2, 24, 40

pytestmark = pytest.mark.usefixtures("ieee_products")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles, the last ones ragged."""
    monkeypatch.setattr(xla, "BLOCK_Q", 16)
    monkeypatch.setattr(xla, "BLOCK_KV", 32)


def bucket(distance):
    """Single distances to 4, then longer and longer runs; indices outside are moved inside."""
    far = jnp.log(jnp.maximum(jnp.abs(distance), 1).astype(jnp.float32)) * 3
    near = jnp.abs(distance) < 4
    return jnp.where(near, distance, jnp.sign(distance) * far.astype(jnp.int32))


# A table's shape, the score function that reads it, and on which indices its index depends.
TABLES = {
    "h": ((N,), lambda s, b, h, q, k, x: s * x[h], "h"),
    "b,h": ((B, N), lambda s, b, h, q, k, x: jnp.tanh(s * x[b, h]), "bh"),
    "scalar": ((), lambda s, b, h, q, k, x: s / (3 + x), ""),
    "q-k": ((T + S,), lambda s, b, h, q, k, x: s + x[q - k + S - 1], "d"),
    "bucket,h": ((9, N), lambda s, b, h, q, k, x: s + s * x[bucket(k - q), h], "dh"),
    "b,q-k": ((B, 21), lambda s, b, h, q, k, x: s + x[b, jnp.clip(q - k, 0, 20)], "bd"),
    "h,q": ((N, T), lambda s, b, h, q, k, x: s * x[h, q], "hq"),
    "b,k": ((B, S), lambda s, b, h, q, k, x: s + x[b, k - 1], "bk"),
    "q,k": ((T, S), lambda s, b, h, q, k, x: s + x[q, k], "qk"),
    "blocks": ((9, 11), lambda s, b, h, q, k, x: s * x[q // 9, k // 9], "qk"),
    "q-k,k-q": ((S,), lambda s, b, h, q, k, x: s + x[q - k] * x[k - q], "d"),
}


def lengths(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def order(seed, n):
    return jnp.asarray(np.random.default_rng(seed).permutation(n)[None], jnp.int32)


def segments(n):
    return jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32) // 20, (B, n))


OPTIONS = {
    "none": {},
    "causal": dict(is_causal=True),
    "window,offsets": dict(local_window_size=(20, 7), query_offset=lengths(3, -9)),
    "lengths": dict(query_seq_lengths=lengths(50, T), key_value_seq_lengths=lengths(S, 0)),
    "segments": dict(segment_ids=(segments(T), segments(S))),
    "positions": dict(is_causal=True, query_positions=order(1, T), key_value_positions=order(2, S)),
    "cap,dropout": dict(
        logits_soft_cap=3.0, dropout_rate=0.3, dropout_key=jax.random.key(1), is_causal=True
    ),
    "sinks,bias": dict(sinks=jnp.linspace(-1.0, 2.0, N), bias=jnp.ones((1, N, 1, S))),
}

# Each kind of index, each option and each form of the sums meet.
PAIRS = [
    ("h", "lengths"),
    ("b,h", "cap,dropout"),
    ("scalar", "causal"),
    ("q-k", "none"),
    ("bucket,h", "window,offsets"),
    ("b,q-k", "segments"),
    ("h,q", "sinks,bias"),
    ("b,k", "positions"),
    ("q,k", "lengths"),
]
EVERY = [(table, option) for table in TABLES for option in OPTIONS]
IMPLEMENTATIONS = ("xla", "interpret")


class Clamped:
    """A table of dense attention; an index outside is moved to the edge."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        pairs = zip(index, self.array.shape, strict=True)
        return self.array[tuple(jnp.clip(i, 0, n - 1) for i, n in pairs)]


def readable(x):
    return Clamped(x) if x.ndim else x


def drawn(table="h", dtype=np.float64, value_mean=0):
    """query, key, value, do, dlse, the slopes and the table.

    With a mean of the values, do sums to zero over channels.
    """
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, T, N, V), (B, T, N)
    q, k, v, do, dlse = (random.normal(size=x) for x in shapes)
    if value_mean:
        v, do = v + value_mean, do - do.mean(-1, keepdims=True)
    q, k, v, do, dlse = (jnp.asarray(x, dtype) for x in (q, k, v, do, dlse))
    x = jnp.asarray(random.normal(size=TABLES[table][0]), jnp.float32)
    return (q, k, v), (do, dlse.astype(jnp.float32)), (jnp.linspace(0.01, 0.1, N), x / 2)


def call_of(implementation, table, options):
    """A function of queries, keys, values, slopes and the table."""
    extra = {"config": SMALL} if implementation == "interpret" else {}

    def call(q, k, v, slopes, x, **others):
        return attention(
            *(q, k, v),
            alibi_slopes=slopes,
            score_mod=ScoreMod(TABLES[table][1], (x,)),
            implementation=implementation,
            return_lse=True,
            **options,
            **extra,
            **others,
        )

    return call


def gradients(call, qkv, cotangents, tables):
    """Return the gradients of the slopes and of the table."""
    return output_and_gradients(call, qkv, cotangents, tables)[1]


def output_and_gradients(call, qkv, cotangents, tables):
    @oracle.compiled
    def run(qkv, cotangents, tables):
        (o, _), pull = jax.vjp(lambda *tables: call(*qkv, *tables), *tables)
        return o, pull(cotangents)

    return run(qkv, cotangents, tables)


def dense(table, options):
    """Dense attention of the oracle; its own products round as those of the dtype."""

    def call(q, k, v, slopes, x):
        def score_mod(s, *at):
            return TABLES[table][1](s, *map(jnp.asarray, at), readable(x))

        return oracle.dense(q, k, v, alibi_slopes=slopes, score_mod=score_mod, **options)

    return call


def exact(qkv, cotangents, tables, table, options, rounded):
    """The gradients in float64, and those from delta of a `rounded` output."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (qkv, cotangents, tables))

        @oracle.compiled
        def run(qkv, cotangents, tables, rounded):
            call, (do, dlse) = functools.partial(dense(table, options), *qkv), cotangents
            (o, _), pull = jax.vjp(call, *tables)
            # A change of delta is one of dlse.
            delta = ((rounded - o) * do).sum(-1)
            return pull((do, dlse)), pull((do, dlse - delta))

        return run(*wide, jnp.asarray(rounded, jnp.float64))


def error(x, want):
    x, want = (np.asarray(y, np.float64) for y in (x, want))
    return np.linalg.norm(x - want) / np.linalg.norm(want)


def judge(table, option, implementation, dtype="float32", value_mean=0):
    """The 2x rule, where delta may come from the implementation's own output in float32."""
    problem, options = drawn(table, dtype, value_mean), OPTIONS[option]
    o, got = output_and_gradients(call_of(implementation, table, options), *problem)
    plain = gradients(dense(table, options), *problem)
    truth, of_delta = exact(*problem, table, options, o)
    for ours, theirs, rounded, want in zip(got, plain, of_delta, truth, strict=True):
        assert ours.dtype == jnp.float32
        # Each exponential takes its argument, of about the size of the LSE, in float32.
        floor = 2.0**-24 * 16
        if dtype != "float32":
            rounded, floor = want, 2.0**-9
        least = max(error(theirs, want), error(rounded, want), floor)
        assert error(ours, want) <= 2 * least, (error(ours, want), least)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("table", "option"), cases.default(PAIRS, EVERY))
def test_gradients_of_tables_are_dense_ones(table, option, implementation):
    judge(table, option, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("table", ["h", "bucket,h"])
@pytest.mark.parametrize(
    ("dtype", "value_mean"), [("bfloat16", 0), ("bfloat16", 20), ("float16", 4)]
)
def test_gradients_of_tables_in_16_bits(table, implementation, dtype, value_mean):
    judge(table, "causal", implementation, dtype, value_mean)


@pytest.mark.parametrize("table", TABLES)
def test_reads_are_found(table):
    shape, score_mod, letters = TABLES[table]
    scores = Scores(score_mod=score_mod, operands=(jax.ShapeDtypeStruct(shape, jnp.float32),))
    reads = table_gradients.reads_of(scores)
    assert {read.table for read in reads} == {1}
    assert {read.letters for read in reads} == {frozenset(letters)}


READS = {
    "a sum of both": (lambda s, b, h, q, k, x: s + x[q + k], "qk"),
    "another factor": (lambda s, b, h, q, k, x: s + x[2 * q - k], "qk"),
    "a difference and the query": (lambda s, b, h, q, k, x: s + x[q - k + q], "qk"),
    "differences of both signs": (lambda s, b, h, q, k, x: s + x[abs(k - q) + (q - k)], "d"),
    "the head beside a difference": (lambda s, b, h, q, k, x: s + x[q + h - k], "dh"),
    "a comparison": (lambda s, b, h, q, k, x: s + x[jnp.where(q >= k, q - k, b)], "bd"),
    "a comparison of products": (lambda s, b, h, q, k, x: s + x[(2 * q >= k).astype(int)], "qk"),
    "floats, which are rounded": (
        lambda s, b, h, q, k, x: s + x[(q.astype("float32") - k.astype("float32")).astype(int)],
        "qk",
    ),
    "short integers": (
        lambda s, b, h, q, k, x: s + x[q.astype("float16").astype(int) - k],
        "qk",
    ),
    "a constant": (lambda s, b, h, q, k, x: s + x[3], ""),
}


@pytest.mark.parametrize("name", READS)
def test_letters_of_an_index(name):
    score_mod, letters = READS[name]
    scores = Scores(score_mod=score_mod, operands=(jax.ShapeDtypeStruct((9,), jnp.float32),))
    [read] = table_gradients.reads_of(scores)
    assert read.letters == frozenset(letters)


def test_index_from_an_integer_table():
    """Integer operands have no gradient, but an index may come from them."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, S), jnp.int32)

    def score_mod(s, b, h, q, k, ids, x, unused):
        return s + x[h, ids[k]]

    (q, k, v), (do, _), _ = drawn(dtype=np.float32)

    def loss(implementation, x):
        operands = ids, x, jnp.ones(3, jnp.float32)
        call = functools.partial(attention, implementation=implementation)
        return (call(q, k, v, score_mod=ScoreMod(score_mod, operands)) * do).sum()

    x = jnp.linspace(0.0, 1.0, 3 * N).reshape(N, 3)
    want, *got = (
        jax.grad(functools.partial(loss, by))(x) for by in ("reference", "xla", "interpret")
    )
    for found in got:
        assert_close(found, want)


def of_two_tables(implementation, dtype, qkv, numbers="float32"):
    """The gradients of slopes and of two tables of a dtype, whose numbers another one holds."""

    def score_mod(s, b, h, q, k, factor, x):
        return s * factor[h] + x[q - k]

    def loss(slopes, *tables):
        call = functools.partial(attention, is_causal=True, implementation=implementation)
        o = call(*qkv, alibi_slopes=slopes, score_mod=ScoreMod(score_mod, tables))
        return o.astype(jnp.float32).sum()

    tables = jnp.linspace(0.01, 0.1, N), jnp.linspace(0.5, 1.0, N), jnp.linspace(-1.0, 1.0, T)
    return oracle.compiled(jax.grad(loss, (0, 1, 2)))(
        *(x.astype(numbers).astype(dtype) for x in tables)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tables_of_16_bits(implementation):
    """Gradients have the dtype of their table, and their sums are rounded to it once."""
    qkv = drawn(dtype=np.float32)[0]
    found = of_two_tables(implementation, "bfloat16", qkv, "bfloat16")
    assert {x.dtype.name for x in found} == {"bfloat16"}
    want = of_two_tables("reference", "float32", qkv, "bfloat16")
    assert_close(found, want, tolerance=2.0**-8, dtypes=False)


def test_tables_in_float64():
    with jax.enable_x64(True):
        qkv = drawn(dtype=np.float64)[0]
        found, want = (of_two_tables(by, "float64", qkv) for by in ("xla", "reference"))
        assert_close(found, want, tolerance=1e-12)


def test_tables_of_an_export_with_symbolic_sizes():
    def gradient(q, x):
        def loss(x):
            score_mod = ScoreMod(TABLES["b,q-k"][1], (x,))
            return attention(q, q, q, score_mod=score_mod, implementation="xla").sum()

        return jax.grad(loss)(x)

    q, x = jnp.cos(jnp.arange(2 * 9 * 2 * 8.0)).reshape(2, 9, 2, 8), jnp.ones((2, 21))
    shape = (*jax.export.symbolic_shape("b, t"), 2, 8)
    shapes = jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
    exported = jax.export.export(jax.jit(gradient))(*shapes)
    np.testing.assert_allclose(exported.call(q, x), gradient(q, x), atol=1e-5)


@pytest.mark.parametrize("sort", [False, True])
def test_numbers_are_added_at_their_index(sort):
    random = np.random.default_rng(0)
    rows, columns = random.integers(0, 5, (7, 1, 30)), random.integers(0, 4, (1, 1, 30))
    x = random.normal(size=(7, 6, 30)).astype(np.float32)
    want = np.ones((5, 4))
    np.add.at(want, tuple(np.broadcast_arrays(rows, columns, x)[:2]), x)
    found = table_gradients.add_at(
        jnp.ones((5, 4)), (jnp.asarray(rows), jnp.asarray(columns)), x, sort=sort
    )
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert float(table_gradients.add_at(jnp.float32(1), (), x, sort=sort)) == pytest.approx(
        1 + x.sum(), 1e-3
    )


def test_hidden_numbers_do_not_reach_tables():
    """NaN in hidden keys and in queries without keys changes no bit."""
    (q, k, v), cotangents, tables = drawn("bucket,h", np.float32)
    options = OPTIONS["lengths"]
    hidden = jnp.arange(S)[None, :, None, None] >= options["key_value_seq_lengths"].reshape(
        B, 1, 1, 1
    )
    poisoned = q.at[0, 50:].set(jnp.nan), *(jnp.where(hidden, jnp.nan, x) for x in (k, v))
    for implementation in IMPLEMENTATIONS:
        call = call_of(implementation, "bucket,h", options)
        clean = gradients(call, (q, k, v), cotangents, tables)
        assert_same_bits(gradients(call, poisoned, cotangents, tables), clean)


TRANSFORMS = {
    "vmap": lambda f: lambda q, *x: jax.vmap(f, (0, None, None))(jnp.stack([q, 2 * q]), *x).sum(),
    "vmap-of-tables": lambda f: (
        lambda q, slopes, x: jax.vmap(f, (None, 0, 0))(
            q, jnp.stack([slopes, 2 * slopes]), jnp.stack([x, -x])
        ).sum()
    ),
    "scan-with-remat": lambda f: (
        lambda q, *x: jax.lax.scan(
            lambda c, _: (c + jax.checkpoint(f)(q + c / 1e3, *x), None), 0.0, None, 2
        )[0]
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("table", ["h", "q-k"])
def test_tables_under_transformations(table, name, implementation):
    (q, k, v), (do, _), tables = drawn(table, np.float32)

    def gradient(by):
        call = call_of(by, table, OPTIONS["causal"])
        transformed = TRANSFORMS[name](lambda q, *x: (call(q, k, v, *x)[0] * do).sum())
        return oracle.compiled(jax.grad(transformed, (0, 1, 2)))(q, *tables)

    assert_close(gradient(implementation), gradient("reference"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_order_of_tables(implementation):
    """Forward over reverse and reverse over reverse, of one operand of two."""

    def score_mod(s, b, h, q, k, colours, factor, x):
        return s * factor[h] + jnp.sin(x[q - k + S]) * colours[h].astype(s.dtype)

    (q, k, v), (do, _), (slopes, factor) = drawn("h", np.float32)
    x = jnp.linspace(-1.0, 1.0, T + S)

    def second(by):
        def loss(slopes, x, factor=factor):
            operands = jnp.arange(N, dtype=jnp.int32), factor, x
            call = functools.partial(attention, implementation=by, is_causal=True)
            o = call(q, k, v, alibi_slopes=slopes, score_mod=ScoreMod(score_mod, operands))
            return (jnp.sin(o) * do).sum()

        def along(slopes, x):
            a, b = jax.grad(loss, (0, 1))(slopes, x)
            return (a * a).sum() + b.sum()

        tangents = jnp.ones_like(slopes), jnp.cos(x)
        return oracle.compiled(
            lambda: (
                jax.jvp(jax.grad(loss, (0, 1)), (slopes, x), tangents)[1],
                jax.grad(along, (0, 1))(slopes, x),
            )
        )()

    assert_close(second(implementation), second("reference"))


# ------------------------------------------------------------------------------------------------
# The choice of an implementation for gradients of tables.


def reason_on(gpu, table, **options):
    q, kv = (jax.ShapeDtypeStruct((2, 4096, n, 128), jnp.bfloat16) for n in (N, K))
    shape, score_mod, _ = TABLES[table]
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32),)
    with described_gpu(gpu):
        return explain(q, kv, kv, score_mod=ScoreMod(score_mod, operands), **options).reason


def test_explain_says_who_computes_tables():
    assert "operands" not in reason_on("NVIDIA A100", "q-k")
    xla = '"xla" computes gradients of slopes or operands: Operand 0 is read at q_pos and k_pos'
    assert xla in reason_on("NVIDIA A100", "q,k")
    if compat.has_mosaic_gpu():
        reason = reason_on("NVIDIA H200", "h", implementation="mosaic")
        assert '"triton" computes gradients of slopes or operands: "mosaic" has no' in reason


def test_tables_without_a_gradient_cost_nothing():
    """No pass more where queries alone are differentiated."""
    (q, k, v), _, tables = drawn("h", np.float32)
    call = call_of("interpret", "h", {})

    def kernels(*argnums):
        def loss(q, *tables):
            return call(q, k, v, *tables)[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss, argnums))(q, *tables)).count(
            "name=pallas_flash_read"
        )

    assert [kernels(0), kernels(0, 1), kernels(0, 1, 2)] == [0, 1, 2]


@pytest.mark.skipif(not compat.has_mosaic_gpu(), reason="no kernels for Hopper")
def test_the_backward_for_hopper_stays():
    """Beside it, the pass for a table is Triton's."""
    q, kv = (jax.ShapeDtypeStruct((1, 512, n, 128), jnp.bfloat16) for n in (N, K))

    def loss(q, k, v, slopes):
        o = attention(q, k, v, alibi_slopes=slopes, implementation="mosaic")
        return o.astype(jnp.float32).sum()

    with described_gpu("NVIDIA H200"):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 3)))(q, kv, kv, jnp.ones(N))
    text = str(traced)
    assert "pallas_flash_backward" in text
    assert text.count("name=pallas_flash_read") == 1


def test_memory_of_a_table_by_distance_is_linear():
    def temporary_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        table = jax.ShapeDtypeStruct((2 * length,), jnp.float32)

        def loss(q, table):
            score_mod = ScoreMod(lambda s, b, h, q, k, x: s + x[q - k + length], (table,))
            return attention(q, q, q, score_mod=score_mod, implementation="xla").sum()

        compiled = jax.jit(jax.grad(loss, 1)).lower(x, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = map(temporary_bytes, (1024, 4096))
    assert many <= 5 * few
