"""Programs that are compiled, checked and timed: a peer's computation of one pass of a shape."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from scripts.benchmarks.peers import Attend, TorchAttend
from scripts.benchmarks.shapes import Shape

# The greatest relative L2 error: four units in the last place of the factors.
ALLOWED = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-8}  # float32: TF32


class _Program:
    """The computation of a pass of a shape by a peer.

    Attributes:
        compile_s: Seconds for tracing, lowering and compiling, the forward that makes the
            residuals of a backward included.
        memory: Bytes of the arguments, results and temporaries of the pass, where known.
    """

    def __init__(self, shape: Shape, attend: Attend | TorchAttend, direction: str):
        self.shape, self.attend, self.direction = shape, attend, direction
        self.compile_s: float = math.nan
        self.memory: dict[str, int] = {}


class JaxProgram(_Program):
    """An `Attend`, compiled for one pass over arguments that are loaded later."""

    def compile(self) -> None:
        """Compile the program; may run in any thread."""
        start = time.perf_counter()
        call, arrays = self.attend.call, dict(self.attend.arrays)
        q, k, v, do = jax.eval_shape(self._to_peer, *arguments(self.shape))
        options = None if self.attend.search else {"xla_gpu_autotune_level": 0}
        if self.direction == "forward":
            self.function = lambda q, k, v, arrays: call(q, k, v, **arrays)
            inputs = q, k, v, arrays
        else:
            residuals, self.function = differentiate(call, self.shape.trained)
            lowered = jax.jit(residuals).lower(q, k, v, arrays)
            self.residuals = lowered.compile(options)
            inputs = do, lowered.out_info
        self.run = jax.jit(self.function).lower(*inputs).compile(options)
        self.compile_s = time.perf_counter() - start
        memory = self.run.memory_analysis()
        if memory is not None:
            self.memory = {
                kind: getattr(memory, f"{kind}_size_in_bytes")
                for kind in ("argument", "output", "temp")
            }

    def load(self, sets: Iterable[tuple[jax.Array, ...]]) -> None:
        """Make the arguments of the pass from sets of q, k, v and do."""
        # One set that is far larger than the cache needs no rotation.
        several = self.memory.get("argument", 0) < 2e9
        self.sets = [self._arguments(*x) for x in itertools.islice(sets, None if several else 1)]
        self.turns = itertools.cycle(self.sets)

    def __call__(self) -> Any:
        """Call the program once, on the next set."""
        return self.run(*next(self.turns))

    @functools.cached_property
    def loop(self) -> Callable:
        """Return a function of (n, *arguments): n calls, each depends on the call before it."""

        def loop(n, first, *rest):
            def body(_, first):
                out = jax.tree.leaves(self.function(first, *rest))
                element = sum(x.ravel()[0].astype(jnp.float32) for x in out)
                return first.at[(0,) * first.ndim].set(element.astype(first.dtype))

            return jax.lax.fori_loop(0, n, body, first)

        return jax.jit(loop)

    def results(self) -> dict[str, jax.Array]:
        """Return the results of the first set, in the common form."""
        named = by_name(self.shape, self.direction, self.run(*self.sets[0]))
        return {
            name: where_filled(self.shape, name, self.attend.from_peer(self.shape, name, x))
            for name, x in named.items()
        }

    def _to_peer(self, *arrays):
        names = ("q", "k", "v", "do")
        return [
            self.attend.to_peer(self.shape, name, x) for name, x in zip(names, arrays, strict=True)
        ]

    def _arguments(self, *arrays):
        q, k, v, do = self._to_peer(*arrays)
        rest = jax.tree.map(jnp.asarray, dict(self.attend.arrays))
        if self.direction == "forward":
            return q, k, v, rest
        return do, self.residuals(q, k, v, rest)


def by_name(shape: Shape, direction: str, results: Any) -> dict[str, Any]:
    """Return results by name: o; or dq, dk, dv and the gradients of the trained arrays."""
    if direction == "forward":
        return {"o": results}
    gradients = dict(zip(("dq", "dk", "dv"), results[:3], strict=True))
    return gradients | {f"d{name}": x for more in results[3:] for name, x in more.items()}


def where_filled(shape: Shape, name: str, x: jax.Array) -> jax.Array:
    """Return `x` with zeros in padding rows, where every peer may have other numbers."""
    if not shape.lengths or name not in ("o", "dq", "do"):
        return x
    filled = jnp.arange(shape.T) < jnp.asarray(shape.each_length())[:, None]
    return jnp.where(filled[:, :, None, None], x, 0)


def differentiate(call: Callable, trained: Iterable[str] = ()) -> tuple[Callable, Callable]:
    """Return two functions: (q, k, v, arrays) -> residuals; (do, residuals) -> (dq, dk, dv, dict).

    The dict has the gradients of the arrays that are `trained`. Call the first function first.
    """
    tree = None

    def residuals(q, k, v, arrays):
        nonlocal tree
        learnt = {name: arrays[name] for name in trained}
        _, pull = jax.vjp(lambda q, k, v, learnt: call(q, k, v, **arrays | learnt), q, k, v, learnt)
        leaves, tree = jax.tree.flatten(pull)
        return leaves

    def pull(do, leaves):
        return jax.tree.unflatten(tree, leaves)(do)

    return residuals, pull


class TorchProgram(_Program):
    """The program of a `TorchAttend`, which PyTorch compiles in its first call."""

    def compile(self) -> None:
        """Do nothing: PyTorch compiles in the first call."""

    def load(self, sets: Iterable[tuple[jax.Array, ...]]) -> None:
        """Take the first set, without a copy: the timer clears the cache between calls."""
        import torch

        start = time.perf_counter()
        arrays = jax.block_until_ready(next(iter(sets)))
        q, k, v, do = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
        if self.direction == "forward":
            self.run = torch.no_grad()(lambda: self.attend.call(q, k, v))
        else:
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            o = self.attend.call(*inputs)
            self.run = lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)
        self.run()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - start

    def __call__(self) -> Any:
        """Call the program once."""
        return self.run()

    def results(self) -> dict[str, jax.Array]:
        """Return the results in the common form."""
        import torch

        out = self.run()
        torch.cuda.synchronize()
        common = {
            name: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous()).astype(jnp.float32)
            for name, x in by_name(self.shape, self.direction, out).items()
        }
        return {name: where_filled(self.shape, name, x) for name, x in common.items()}


Program = JaxProgram | TorchProgram


def arguments(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the types of q, k, v and do in the common form."""
    s, v = shape, shape.value_dim
    shapes = (s.B, s.T, s.N, s.D), (s.B, s.S, s.K, s.D), (s.B, s.S, s.K, v), (s.B, s.T, s.N, v)
    return tuple(jax.ShapeDtypeStruct(x, jnp.dtype(s.dtype)) for x in shapes)


@functools.partial(jax.jit, static_argnums=0)
def draw(shape: Shape, seed) -> list[jax.Array]:
    """Return random normal q, k, v and do; do is zero in padding rows."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return [
        where_filled(shape, name, jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype))
        for name, key, x in zip(("q", "k", "v", "do"), keys, arguments(shape), strict=True)
    ]


def errors(results: Mapping[str, jax.Array], right: Mapping[str, jax.Array]) -> dict[str, float]:
    """Return the relative L2 error of each result."""
    return {name: float(_relative_l2(results[name], right[name])) for name in right}


@jax.jit
def _relative_l2(a, b):
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


def is_red(result_errors: Mapping[str, float], dtype: str) -> bool:
    """Whether an error is too large, or not a number."""
    return not all(error <= ALLOWED[dtype] for error in result_errors.values())
