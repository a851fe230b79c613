"""Errors of `pallas_flash.flax`; imports on demand; strict switches."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import cases
from support.flax_cases import (
    FEATURES,
    KV_LEN,
    NUM_HEADS,
    POSITIONS,
    Q_LEN,
    normal,
    qkv,
    rope_by_hand,
    self_attention,
    with_cache,
)
from support.strict import strictly

from pallas_flash.flax import SelfAttention, apply_rope, attention_fn
from pallas_flash.masks import PrefixLM

pytestmark = pytest.mark.usefixtures("ieee_products")


Q, K, V = qkv()
X = jnp.ones((2, Q_LEN, FEATURES))
ERRORS = {
    ValueError: {
        "rank": (lambda: attention_fn(Q[0, 0], K, V), r"\[\*batch, length, heads"),
        "batch axes": (lambda: attention_fn(Q, K[:1], V), "same batch axes"),
        "batch axes of equal product": (
            lambda: attention_fn(Q.reshape(2, 1, *Q.shape[1:]), K[None], V[None]),
            "same batch axes",
        ),
        "mask rank": (
            lambda: attention_fn(Q, K, V, mask=jnp.ones((1, 1, 1, Q_LEN, KV_LEN))),
            r"`mask` must broadcast to \(2, 4, 5, 7\); got mask.shape=\(1, 1, 1, 5, 7\)",
        ),
        "mask shape": (
            lambda: attention_fn(Q, K, V, mask=jnp.ones((KV_LEN, Q_LEN))),
            "`mask` must broadcast",
        ),
        "bias shape": (
            lambda: attention_fn(Q, K, V, bias=jnp.ones((3, 1, Q_LEN, KV_LEN))),
            "`bias` must broadcast",
        ),
        "dropout_rate": (
            lambda: attention_fn(Q, K, V, dropout_rate=1.5),
            "`dropout_rate` must be at least 0 and less than 1; got float 1.5",
        ),
        "dropout_rng": (
            lambda: attention_fn(Q, K, V, dropout_rate=0.5),
            "`dropout_rng` must be a jax.random key .*; got None with dropout_rate=0.5",
        ),
        "negative dropout_rate": (
            lambda: attention_fn(Q, K, V, dropout_rate=-0.5),
            "`dropout_rate` must be at least 0",
        ),
        "input_positions": (
            lambda: attention_fn(Q, K, V, input_positions=POSITIONS),
            "`input_positions` must be None without `rope`",
        ),
        "rope of a decoding step": (
            lambda: attention_fn(Q[:, :1], K, V, rope=rope_by_hand),
            r"`rope` must be None unless .*; got query.shape=\(2, 1, 4, 8\), key.shape=\(2, 7, 4, ",
        ),
        "rope of a decoding step with positions": (
            lambda: attention_fn(
                Q[:, :1], K, V, rope=rope_by_hand, input_positions=jnp.full((2, 1), 6)
            ),
            "`rope` must be None unless there are as many queries as keys",
        ),
        "is_causal of one query without a mask": (
            lambda: attention_fn(Q[:, :1], K, V, is_causal=True),
            "`is_causal` must be False for one query of 7 keys.*; got True with mask NoneType None"
            ". Drop it .* `query_offset`",
        ),
        "is_causal of one query with a mask for all keys": (
            lambda: attention_fn(Q[:, :1], K, V, mask=jnp.ones((2, 1, 1, 1)), is_causal=True),
            r"`is_causal` must be False .*; got True with mask an array of bool with shape \(2, 1",
        ),
        "is_causal of one query with a mask object": (
            lambda: attention_fn(
                Q[:, :1], K, V, mask=PrefixLM(jnp.ones(2, jnp.int32)), is_causal=True
            ),
            "`is_causal` must be False for one query of 7 keys.*; got True with mask PrefixLM",
        ),
        "sequence_axis": (
            lambda: attention_fn(Q, K, V, sequence_axis="sequence"),
            "`sequence_axis` must name mesh axes.*got 'sequence', and the call is in none",
        ),
        "sequence_axis of a layer": (
            lambda: self_attention(sequence_axis="sequence")(X),
            "`sequence_axis` must name mesh axes.*got 'sequence', and the call is in none",
        ),
        "context_parallelism": (
            lambda: self_attention(context_parallelism="zigzag")(X),
            "`context_parallelism` must be",
        ),
        "features": (lambda: self_attention(features=0), "`features` must be an int of at least 1"),
        "num_kv_heads": (
            lambda: self_attention(num_kv_heads=3),
            "multiple of `num_kv_heads`; got num_heads=4, num_kv_heads=3",
        ),
        "no num_kv_heads": (lambda: self_attention(num_kv_heads=0), "got int 0"),
        "features per head": (
            lambda: self_attention(features=30),
            "`features` must be a multiple of `num_heads`",
        ),
        "num_heads as a float": (
            lambda: self_attention(num_heads=4.0),
            "`num_heads` must be an int of at least 1; got float 4.0",
        ),
        "head_dim": (lambda: self_attention(head_dim=0), "`head_dim` must be an int of at least 1"),
        "odd head_dim": (lambda: self_attention(head_dim=7), "`head_dim` must be even"),
        "rope_theta": (lambda: self_attention(rope_theta=0.0), "`rope_theta` must be pos"),
        "base of apply_rope": (
            lambda: apply_rope(Q, jnp.arange(Q_LEN), -1.0),
            "`rope_theta` must be positive; got -1.0",
        ),
        "rope_theta of NaN": (
            lambda: self_attention(rope_theta=jnp.nan),
            "`rope_theta` must be pos",
        ),
        "attention without largest scores": (
            lambda: self_attention(sow_max_logits=True, attention=lambda q, k, v, **_: q)(X),
            r"`attention` must return \(output, largest scores\)",
        ),
        "two rotary rules": (
            lambda: self_attention(rope_theta=500.0, rope=apply_rope),
            "`rope_theta` must be None with `rope`, .*; got 500.0",
        ),
        "x features": (lambda: self_attention()(X[..., 1:]), r"`x` must be .*length, 32\]"),
        "x rank": (lambda: self_attention()(X[0, 0]), "`x` must be"),
        "positions shape": (
            lambda: self_attention()(X, positions=jnp.arange(3)),
            r"`positions` must broadcast to \(2, 5\); got positions.shape=\(3,\)",
        ),
        "positions without rope": (
            lambda: self_attention(rope_theta=None)(X, positions=jnp.arange(Q_LEN)),
            "`positions` must be None without `rope` and `rope_theta`",
        ),
        "reordered without positions": (
            lambda: self_attention()(X, reordered=True),
            "`positions` must be given with reordered=True; got None",
        ),
        "reordered, wrong positions": (
            lambda: self_attention(rope_theta=None)(X, positions=jnp.arange(3), reordered=True),
            r"`positions` must broadcast to \(2, 5\); got positions.shape=\(3,\)",
        ),
        "reordered, decoding": (
            lambda: with_cache()(
                normal(1, (2, 3, FEATURES)), positions=jnp.arange(3), reordered=True, decode=True
            ),
            "`reordered` must be False with decode=True",
        ),
        "segment_ids shape": (
            lambda: self_attention()(X, segment_ids=jnp.zeros((3, Q_LEN), int)),
            "`segment_ids` must broadcast",
        ),
        "module dropout_rate": (
            lambda: self_attention(dropout_rate=1.0),
            "`dropout_rate` must be at least 0 and less than 1; got float 1.0",
        ),
        "undecided dropout": (
            lambda: self_attention(dropout_rate=0.5)(X),
            "`deterministic` must be True or False",
        ),
        "dropout without random numbers": (
            lambda: self_attention(dropout_rate=0.5, keep_rngs=False)(X, deterministic=False),
            "`rngs` must be given",
        ),
        "decode without a cache": (
            lambda: self_attention()(X, decode=True),
            "`decode` must be False without a cache; got True. Call `init_cache",
        ),
        "decode in a layer that is not causal": (
            lambda: with_cache(is_causal=False)(X, decode=True),
            "`decode` must be False in a layer with is_causal=False",
        ),
        "decode with a mask": (
            lambda: with_cache()(X, mask=jnp.ones((Q_LEN, Q_LEN), bool), decode=True),
            "`mask` must be None with decode=True",
        ),
        "decode with segment_ids": (
            lambda: with_cache()(X, segment_ids=jnp.zeros((2, Q_LEN), jnp.int32), decode=True),
            "`segment_ids` must be None with decode=True",
        ),
        "decode of another batch": (
            lambda: with_cache(batch=3)(X, decode=True),
            r"`x` must have the batch axes \(3,\) of the cache; got x.shape=\(2, 5, 32\)",
        ),
        "decode of more than there is room for": (
            lambda: [layer := with_cache(), layer(X, decode=True), layer(X, decode=True)],
            "`x` must fit in what is left of the cache; got 5 tokens with 5 of 9 taken",
        ),
        "decode of more than the cache": (
            lambda: nnx.jit(lambda layer: layer(X, decode=True))(with_cache(length=4)),
            "got 5 tokens with some of 4 taken",
        ),
        "cache of negative length": (
            lambda: self_attention().init_cache((2, -1, 32)),
            r"`input_shape` must be sizes \(\*batch, length, 32\); got tuple \(2, -1, 32\)",
        ),
        "cache of a number": (
            lambda: self_attention().init_cache(9),
            r"`input_shape` must be sizes \(\*batch, length, 32\); got int 9",
        ),
        "cache of other features": (
            lambda: self_attention().init_cache((2, 9, 31)),
            r"`input_shape` must be sizes \(\*batch, length, 32\); got tuple \(2, 9, 31\)",
        ),
        "module mask shape": (
            lambda: self_attention()(X, mask=jnp.ones((3, Q_LEN), bool)),
            r"`mask` must broadcast to \(2, 4, 5, 5\); got mask.shape=\(3, 5\)",
        ),
        "module bias shape": (
            lambda: self_attention()(X, bias=jnp.ones((NUM_HEADS, Q_LEN + 1, Q_LEN))),
            "`bias` must broadcast to",
        ),
        "seq_lengths shape": (
            lambda: self_attention()(X, seq_lengths=jnp.ones(3, jnp.int32)),
            r"`seq_lengths` must broadcast to \(2,\)",
        ),
        "window of a module": (
            lambda: self_attention(local_window_size=-1)(X),
            "`local_window_size` must not be negative",
        ),
        "soft cap of a module": (
            lambda: self_attention(logits_soft_cap=0.0)(X),
            "`logits_soft_cap` must be positive",
        ),
        "rope of an odd size": (
            lambda: apply_rope(Q[..., 1:], jnp.arange(Q_LEN)),
            "`x` must be .*even",
        ),
    },
    TypeError: {
        **{
            f"{name} of a module": (
                lambda part=part: self_attention(**part),
                f"`{name}` must be a class or a function; got int 3",
            )
            for name in ("linear", "norm", "rope", "attention")
            for part in [{"rope_theta": None, name: 3}]
        },
        "rope_theta as text": (
            lambda: self_attention(rope_theta="10000"),
            "`rope_theta` must be a number; got str '10000'",
        ),
        "base of apply_rope": (
            lambda: apply_rope(Q, jnp.arange(Q_LEN), None),
            "`rope_theta` must be a number; got NoneType",
        ),
        "dropout_rate as an array, and off": (
            lambda: attention_fn(Q, K, V, dropout_rate=jnp.float32(0.5), deterministic=True),
            "`dropout_rate` must be a number; got an array",
        ),
        "dropout_rng of another kind": (
            lambda: attention_fn(Q, K, V, dropout_rate=0.5, dropout_rng=7),
            "must be a jax.random key; got int 7",
        ),
        "precision": (
            lambda: attention_fn(Q, K, V, precision=("high", "high")),
            "`precision` must be None",
        ),
        "integer bias": (
            lambda: attention_fn(Q, K, V, bias=jnp.ones((Q_LEN, KV_LEN), int)),
            "`bias` must be floating point",
        ),
        "is_causal as an array": (
            lambda: attention_fn(Q, K, V, is_causal=jnp.array(True)),
            "`is_causal` must be True or False; got an array of bool",
        ),
        "reordered as an int": (
            lambda: self_attention()(X, positions=jnp.arange(Q_LEN), reordered=1),
            "`reordered` must be True or False; got int 1",
        ),
        "positions dtype": (
            lambda: self_attention()(X, positions=jnp.arange(5.0)),
            "`positions` must be integers; got float32. Cast them",
        ),
        "positions as a list": (
            lambda: self_attention()(X, positions=[*range(Q_LEN)]),
            "`positions` must be an array; got list",
        ),
        "x as a list": (lambda: self_attention()([[0.0]]), "`x` must be an array; got list"),
        "turned list": (lambda: apply_rope([0.0], 0), "`x` must be an array; got list"),
        "dtype": (lambda: self_attention(dtype="int8"), "`dtype` must be floating point; got int8"),
        "param_dtype": (lambda: self_attention(param_dtype=None), "`param_dtype` must be a dtype"),
        "precision of a layer": (
            lambda: self_attention(precision="x"),
            "`precision` must be None, a jax.lax",
        ),
        "rngs": (lambda: self_attention(rngs=jax.random.key(0)), "`rngs` must be an `nnx.Rngs`"),
        "dropout_rng, of several lines": (
            lambda: attention_fn(Q, K, V, dropout_rate=0.5, dropout_rng=nnx.Rngs(0)),
            r"`dropout_key` must be a jax.random key; got Rngs Rngs\( # .*\. Pass",
        ),
        "module dropout_rate as text": (
            lambda: self_attention(dropout_rate="0.1"),
            "`dropout_rate` must be a number; got str '0.1'",
        ),
        "cache of integers": (
            lambda: self_attention().init_cache((2, 9, 32), jnp.int8),
            "`dtype` must be floating point; got int8",
        ),
        "seq_lengths as a list": (
            lambda: self_attention()(X, seq_lengths=[5, 3]),
            "`seq_lengths` must be an array; got list",
        ),
        "seq_lengths dtype": (
            lambda: self_attention()(X, seq_lengths=jnp.ones(2)),
            "`seq_lengths` must be int32; got float32. Cast it",
        ),
        "bias as a list": (
            lambda: self_attention()(X, bias=[[0.0] * Q_LEN] * Q_LEN),
            "`bias` must be an array; got list",
        ),
    },
    NotImplementedError: {
        "weights of a part": (
            lambda: attention_fn(Q, K, V, module=nnx.Module(), sequence_axis="sequence"),
            "`module` must be None with `sequence_axis`.*; got Module",
        ),
    },
}


@pytest.mark.parametrize(
    ("exception", "case"),
    [(exception, case) for exception, rows in ERRORS.items() for case in rows],
)
def test_error(exception, case):
    call, message = ERRORS[exception][case]
    with pytest.raises(exception, match=message):
        call()


@pytest.mark.parametrize("x64", cases.default([True], [False, True]))
def test_strict_switches(x64):
    x = jax.ShapeDtypeStruct((2, 3, Q_LEN, FEATURES), jnp.float32)
    numbers = {
        "bias": jax.ShapeDtypeStruct((Q_LEN, Q_LEN), jnp.float32),
        "segment_ids": jax.ShapeDtypeStruct((Q_LEN,), jnp.int32),
        "positions": jax.ShapeDtypeStruct((Q_LEN,), jnp.int32),
        "seq_lengths": jax.ShapeDtypeStruct((3,), jnp.int32),
    }

    def run(x, numbers):
        layer = SelfAttention(
            FEATURES,
            NUM_HEADS,
            num_kv_heads=2,
            is_causal=True,
            rope_theta=10_000.0,
            use_bias=True,
            normalize_qk=True,
            use_sinks=True,
            logits_soft_cap=5.0,
            local_window_size=3,
            dropout_rate=0.5,
            deterministic=False,
            implementation="xla",
            rngs=nnx.Rngs(0),
        )
        gradients = nnx.grad(lambda layer: layer(x, **numbers).sum())(layer)
        layer.init_cache(x.shape)
        return gradients, layer(x[..., :2, :], decode=True), layer(x[..., 2:3, :], decode=True)

    with strictly(x64=x64):
        shapes = jax.eval_shape(run, x, numbers)
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
