"""Functions of users that are refused, of scores and of a `Predicate`, and their operands."""

import jax
import jax.numpy as jnp
from support.calls import Row, assert_each, f32, given

from pallas_flash import ScoreMod
from pallas_flash.masks import Predicate


class Unhashable:
    """A function that could be compiled in only once for each of its values."""

    __hash__ = None

    def __call__(self, *at):
        return at[-1] >= at[-2]


TABLE = jnp.arange(12.0).reshape(3, 4)

# Wrong functions: the function, its operands, the error. The functions take scores and
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


WHOLE = "float32 of shape (2, 3, 1, 5, 7)"


def bad_score_functions():
    for id, (fn, operands, fragment) in FUNCTIONS.items():
        yield Row(
            f"score function: {id}",
            lambda fn=fn, operands=operands: {"score_mod": ScoreMod(fn, operands)},
            TypeError,
            f"`ScoreMod.fn` {fragment}" if fragment.startswith("must be") else fragment,
        )
    kinds = {
        "a number": 3,
        "a Predicate": Predicate(lambda b, h, q, k: q >= k),
        "a function and its operands": (lambda s, *at: s, ()),
    }
    said = "`score_mod` must be a function of a score and its indices, or a pallas_flash.ScoreMod"
    yield from given("score_mod", kinds, TypeError, said, "score function that is")
    given_shape = "float32 of shape (2, 3)"
    # The last ones have the right shape for one batch element and head.
    for id, fn, got, wanted in (
        ("another dtype", lambda s, *at: s.astype(jnp.bfloat16), "bfloat16 of shape (2, 3)", ""),
        ("ints", lambda s, b, h, q, k: q - k, "int32 of shape (2, 3)", ""),
        ("another shape", lambda s, *at: s[:, :2], "float32 of shape (2, 2)", ""),
        ("one more axis", lambda s, *at: s[None], "float32 of shape (1, 2, 3)", ""),
        ("a sum", lambda s, *at: s.sum(), "float32 of shape ()", ""),
        ("a mean", lambda s, *at: s.mean(-1, keepdims=True), "float32 of shape (2, 1)", ""),
        ("a bool", lambda s, *at: True, "bool of shape ()", ""),
        ("the first keys", lambda s, *at: s[..., :3], "float32 of shape (2, 3, 1, 5, 3)", WHOLE),
        ("too few axes", lambda s, *at: jnp.squeeze(s), "float32 of shape (2, 3, 5, 7)", WHOLE),
    ):
        said = (
            "`score_mod` must return scores of the shape and dtype that it is given; got "
            f"{got} for {wanted or given_shape}."
        )
        yield from given("score_mod", {id: fn}, TypeError, said, "score function that returns")
    said = (
        "must be traceable for indices b of shape (2, 1, 1, 1, 1), h of (1, 3, 1, 1, 1), q_pos of "
        "(1, 1, 1, 5, 1) and k_pos of (1, 1, 1, 1, 7), followed by 0 operands; got TypeError: "
    )
    reshaped = {"of two axes": lambda s, *at: s.reshape(2, 3)}
    yield from given("score_mod", reshaped, TypeError, said)


def of_indices(fn):
    return lambda b, h, q, k, *operands: fn(jnp.float32(0), b, h, q, k, *operands)


def bad_predicates():
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
        ("the first keys", lambda b, h, q, k: (q >= k)[..., :3], "bool of shape (1, 1, 1, 5, 3)"),
        ("fewer axes", lambda b, h, q, k: jnp.squeeze(q >= k), "bool of shape (5, 7)"),
        ("one more axis", lambda b, h, q, k: (q >= k)[None], "bool of shape (1, 2, 3)"),
    ):
        yield Row(
            f"Predicate that returns {id}",
            lambda fn=fn: {"mask": Predicate(fn)},
            TypeError,
            f"`Predicate.fn` must return a bool for each pair of its indices; got {got} for ",
        )


def bad_operands():
    def of_score(operands):
        return {"score_mod": ScoreMod(lambda s, b, h, q, k, *xs: s, operands)}

    def of_predicate(operands):
        return {"mask": Predicate(lambda b, h, q, k, *xs: q >= k, operands)}

    for name, call in (("ScoreMod.operands", of_score), ("Predicate.operands", of_predicate)):
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


ROWS = [*bad_score_functions(), *bad_predicates(), *bad_operands()]


def test_error_messages():
    assert_each(ROWS)
