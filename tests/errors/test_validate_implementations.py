"""Implementations, and methods for a sequence that devices divide, which do not serve a call.

Errors that need a mesh are in test_context_devices.py.
"""

import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.calls import NEWER, Row, assert_each, f32, given, inputs, row_of

import pallas_flash
from pallas_flash._execution.context import choice
from pallas_flash.masks import Predicate, PrefixLM, Tree
from pallas_flash.tuning import ForwardTile, TileSizes

ONE_OF = (
    "`implementation` must be None or one of ('mosaic', 'triton', 'interpret', 'xla', "
    "'reference'); "
)


def not_served():
    asked = "implementation"
    kinds = ("XLA", "", 1, ["xla"], np.ones(3), jnp.ones(3))
    yield from given(asked, kinds, ValueError, ONE_OF)
    yield Row("implementation traced", lambda: {asked: 1}, ValueError, ONE_OF, traced=asked)
    advice = {
        "cudnn": '; cuDNN is `jax.nn.dot_product_attention(..., implementation="cudnn")`',
        "xla_chunked": '; tokamax\'s "xla_chunked" is "xla"',
        "nothing": "",
    }
    for x, more in advice.items():
        said = f"{ONE_OF}got {x!r}. Use None for the fastest{more}."
        yield from given(asked, (x,), ValueError, said)
    yield Row(
        "triton on a CPU",
        lambda: {"implementation": "triton"},
        NotImplementedError,
        "got 'triton'. The kernels need an NVIDIA GPU, and the device is cpu. Use \"xla\".",
    )
    for id, options, name in (
        ("score function", dict(score_mod=lambda s, *at: jnp.round(s)), "score_mod"),
        ("Predicate", dict(mask=Predicate(lambda *at: jnp.round(at[2] / 2) > at[3])), "Predicate"),
    ):
        yield Row(
            f"triton for a {id}",
            lambda options=options: {"implementation": "triton", **options},
            NotImplementedError,
            f"got 'triton'. Pallas cannot lower `round` in `{name}` to Triton. Use \"xla\".",
            gpu="NVIDIA A100",
        )
    for gpu, capability in {"Tesla V100": "7.0", "Tesla T4": "7.5", "Tesla P100": "6.0"}.items():
        yield Row(
            f"triton on a {gpu}",
            lambda: {"implementation": "triton"},
            NotImplementedError,
            f"compute capability 8.0 or more (A100 or newer), and the device is {gpu} (described, "
            f'not here) with {capability}. Use "xla".',
            gpu=gpu,
        )
    for implementation, gpu in (("triton", "NVIDIA H200"), ("interpret", None)):
        for id, arguments, fragment, x64 in (
            ("float64", lambda: inputs(jnp.float64), "Got float64, and the kernels", True),
            ("head dim", lambda: inputs(head_dim=257), "Got a head dim of 257, and", False),
            ("value size", lambda: {"value": f32(2, 7, 3, 300)}, "Got a head dim of 300,", False),
        ):
            yield Row(
                f"{implementation} for {id}",
                lambda arguments=arguments, implementation=implementation: {
                    **arguments(),
                    "implementation": implementation,
                },
                NotImplementedError,
                f"`implementation` must be one that serves the call; got '{implementation}'. "
                + fragment,
                gpu=gpu,
                x64=x64,
            )


def not_served_on_hopper():
    """Yield the errors of "mosaic" for calls that other implementations serve."""

    def half(head_dim=64, dtype=jnp.bfloat16, **options):
        x = jnp.zeros((2, 5, 4, head_dim), dtype)
        return dict(query=x, key=x, value=x, implementation="mosaic", **options)

    newer = [
        ("float32", lambda: half(dtype=jnp.float32), "Got float32, and they serve float16 and "),
        ("a head dim", lambda: half(36), "Got head dims of 36 and 36 (of values), and they "),
        (
            "a score function",
            lambda: half(score_mod=lambda s, *at: jnp.floor(s)),
            "Pallas cannot lower `floor` in `score_mod` to Mosaic GPU.",
        ),
    ]
    older = [("this JAX", half, "in Mosaic GPU need JAX 0.11.2 or newer, and this is 0.10.2.")]
    for name, arguments, fragment in newer if NEWER else older:
        yield Row(f"mosaic for {name}", arguments, NotImplementedError, fragment, gpu="NVIDIA H200")
    for gpu, told in (
        ("NVIDIA A100", 'NVIDIA A100 (described, not here) with 8.0. Use "triton".'),
        ("NVIDIA B200", 'NVIDIA B200 (described, not here) with 10.0. Use "triton".'),
        ("NVIDIA Z900", 'NVIDIA Z900 (described, not here). Use "triton".'),
        (None, 'the device is cpu. Use "xla".'),
    ):
        yield Row(f"mosaic on {gpu or 'a CPU'}", half, NotImplementedError, told, gpu=gpu)


def not_batch_invariant():
    """Yield the errors of calls that cannot be batch-invariant."""

    def call(dtype=jnp.bfloat16, head_dim=64, **options):
        x = jax.ShapeDtypeStruct((1, 256, 4, head_dim), dtype, sharding=options.pop("rows", None))
        return dict(query=x, key=x, value=x, batch_invariant=True) | options

    def row(id, error, fragment, gpu="NVIDIA H200", **options):
        named = dict(gpu=gpu, function=pallas_flash.explain)
        return Row(f"batch invariance: {id}", lambda: call(**options), error, fragment, **named)

    yield row("a number", TypeError, "`batch_invariant` must be True or Fal", batch_invariant=1)
    for name in ("xla", "triton", "interpret", "reference"):
        said = f"rows of the others depend on the batch; got '{name}'. Drop one of the two."
        yield row(name, ValueError, said, implementation=name)
    scale = dict(scale=jnp.float32(1.0))
    yield row("a scale", ValueError, "`scale` must be None or a number", **scale)
    flags, told = np.array([True, False]), "`batch_invariant` must be True or False; got an array"
    yield row("flags and a scale", TypeError, told, **scale | dict(batch_invariant=flags))
    said = "`batch_invariant` must be False where it does not serve the call; got True. "
    yield row("a CPU", NotImplementedError, f"{said}The kernels in Mosaic GPU need a", gpu=None)
    yield row("an A100", NotImplementedError, "the device is NVIDIA A100", gpu="NVIDIA A100")
    told = "at a multiple of 128 with `batch_invariant=True`; got another one, of query 100 of "
    yield row("documents", ValueError, told, segment_ids=jnp.arange(256)[None] // 100)
    two_runs = jnp.array([[0] * 128 + [1] * 64 + [0] * 64])
    yield row("a document in two runs", ValueError, "of query 0 of ba", segment_ids=two_runs)
    yield row("gradients", ValueError, "`reproducible` must be None or True", reproducible=False)
    divided = "`batch_invariant` must be False where devices divide the sequence"
    if not NEWER:
        older = said + "The kernels in Mosaic GPU need JAX 0.11.2 or newer, and this is"
        yield row("older JAX", NotImplementedError, older)
        shard = types.SimpleNamespace(symbolic=(), batch_invariant=True)
        asked = dict(problem=shard, devices=4, asked=None)
        yield row_of(
            "batch invariance: a shard", choice.choose, NotImplementedError, divided, **asked
        )
        return
    positions = dict(query_positions=np.arange(256, dtype=np.int32)[None])
    for id, told, options in (
        ("float32", "float32, and they serve float16", dict(dtype=jnp.float32)),
        ("head dim", "a head dim of 320, and the kernels", dict(head_dim=320)),
        ("dropout", "dropout, whose ran", dict(dropout_rate=0.1, dropout_key=jax.random.key(0))),
        ("bias", "a `bias`. Drop", dict(bias=f32(1, 1, 1, 256))),
        ("score_mod", "a `score_mod`. Drop", dict(score_mod=lambda s, *at: s)),
        ("mask array", "a mask (mask array), and it", dict(mask=np.ones((256, 256), bool))),
        ("PrefixLM", "a mask (prefix), and it", dict(mask=PrefixLM(np.int32([3])))),
        ("tree", "a mask (either), and it", dict(mask=Tree(np.int32([[-1] * 256])))),
        *(
            (f"positions, {of}", "positions as arrays, and keys", options | positions)
            for of, options in {
                "causal": dict(is_causal=True),
                "slopes": dict(alibi_slopes=jnp.ones(4)),
            }.items()
        ),
    ):
        yield row(id, NotImplementedError, f"{said}Got {told}", **options)
    yield row(
        "tiles",
        ValueError,
        "`config.forward` must have `block_kv=128` with `batch_invariant=True`",
        config=TileSizes(forward=ForwardTile(2, 64, 1)),
    )
    rows = NamedSharding(AbstractMesh((4,), ("sequence",)), P(None, "sequence"))
    yield row("a divided sequence", NotImplementedError, divided, rows=rows)


def bad_context():
    said = (
        "`sequence_axis` must name mesh axes, each once, that a `jax.shard_map` around the "
        "call has made manual; got {x!r}, and the call is in none."
    )
    axes = ("sequence", ("data", "sequence"), (), {"sequence"}, [["sequence"]], 3)
    yield from given("sequence_axis", axes, ValueError, said)
    said = (
        "`context_parallelism` must be None or one of ('ring', 'gather', 'heads'); got {x.__class__"
        ".__name__} {x!r}. Use None for the one that a rule picks"
    )
    for x, more in {
        3: ".",
        "ulysses": '; Ulysses is "heads".',
        "all_gather": '; it is "gather".',
        "p2p": '; it is "ring".',
        "nothing": ".",
    }.items():
        yield from given("context_parallelism", (x,), ValueError, said + more)

    def divided(heads: int, keys: P):
        mesh = AbstractMesh((4,), ("sequence",))
        query, key = (
            jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
            for spec in (P(None, "sequence"), keys)
        )
        return {"query": query, "key": key, "value": key}

    yield Row(
        "heads that devices do not divide",
        lambda: divided(6, P(None, "sequence")) | {"context_parallelism": "heads"},
        NotImplementedError,
        "`context_parallelism` must be a method that serves the call; got 'heads'. Got 6 query "
        "heads, which 4 devices do not divide. Use None, or one of ['ring', 'gather'].",
        function=pallas_flash.explain,
    )
    yield Row(
        "a ring of keys that are not divided",
        lambda: divided(4, P()) | {"context_parallelism": "ring"},
        NotImplementedError,
        "got 'ring'. Every device has all keys and values, and nothing is sent.",
        function=pallas_flash.explain,
    )


def symbolic():
    def shapes(dims, **options):
        shape = jax.export.symbolic_shape(dims)
        x = jax.ShapeDtypeStruct(shape, jnp.float32, **options)
        return {"query": x, "key": x, "value": x}

    rows = NamedSharding(AbstractMesh((2,), ("sequence",)), P(None, "sequence"))
    for id, arguments, fragment in (
        (
            "kernels with symbolic sizes",
            lambda: shapes("b, t, 4, 8") | {"implementation": "interpret"},
            "got 'interpret'. Got symbolic sizes (b, t), and the kernels are compiled for known "
            'ones. Use "xla".',
        ),
        (
            "a symbolic number of heads",
            lambda: shapes("b, t, n, 8"),
            "`query` must have a known number of heads and a known head dim; got n heads of "
            "size 8 (query.shape=(b, t, n, 8)).",
        ),
        (
            "a symbolic head dim",
            lambda: shapes("b, t, 4, h"),
            "got 4 heads of size h (query.shape=(b, t, 4, h)).",
        ),
        (
            "a divided sequence of a symbolic batch",
            lambda: shapes("b, 16, 4, 8", sharding=rows),
            "`query` must have known sizes where its sequence is sharded; got the symbolic sizes "
            "b. Give each a number, ",
        ),
        (
            "a divided sequence of a symbolic length",
            lambda: shapes("2, 2*t, 4, 8", sharding=rows),
            "got T=2*t. Give the length a number, ",
        ),
    ):
        yield Row(id, arguments, NotImplementedError, fragment, function=pallas_flash.explain)


ROWS = [
    *not_served(),
    *not_served_on_hopper(),
    *not_batch_invariant(),
    *bad_context(),
    *symbolic(),
]


def test_error_messages():
    assert_each(ROWS)
