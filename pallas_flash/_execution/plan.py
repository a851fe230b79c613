"""The plan of a call: the implementation of each pass, and the launch of a pass.

A call has a forward, operands -> (o, LSE), and a backward, (operands, o, LSE, do, dlse) ->
gradients; further passes give gradients of tables, and tangents. A pass runs on the devices that
share the arrays (`_execution.partition`), then on those that share the sequence
(`_execution.context`), and then on one device, where an implementation computes it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash._backends import xla
from pallas_flash._execution import (
    context,
    lowered_once,
    partition,
    tangents,
    tile_choice,
    vmap_size,
)
from pallas_flash._execution.partition import Along
from pallas_flash._jax.one_device import on_one_device
from pallas_flash._problem.features import features_of
from pallas_flash._problem.problem import Gradients, Problem, SplitOutput
from pallas_flash._problem.scores import LogSum
from pallas_flash._problem.tile_sizes import FORWARD, TileSizes, tile_of

NO_TILES = TileSizes()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """The gradients that cost extra work: whether each is asked for."""

    scale: bool = False
    bias: bool = False
    sinks: bool = False
    slopes: bool = False
    score_operands: tuple[bool, ...] = ()

    def flags(self) -> dict[str, bool]:
        """Return these as keywords of the backwards, which have no gradients of tables."""
        return {f"want_{name}": getattr(self, name) for name in ("scale", "bias", "sinks")}

    @property
    def tables(self) -> tuple[bool, ...]:
        """The gradients that a pass of its own computes, in the order of `table_gradients`."""
        return self.slopes, *self.score_operands

    def gradient_letters(self, axes: Problem) -> Gradients:
        """Return the letters of the gradients that are computed, from the operands' letters."""
        letters = {
            name: getattr(axes, name) if getattr(self, name, True) else None
            for name in Gradients._fields
        }
        if any(self.score_operands):
            operands = zip(axes.score_operands, self.score_operands, strict=True)
            letters["score_operands"] = tuple(x if wanted else None for x, wanted in operands)
        else:
            letters["score_operands"] = None
        return Gradients(**letters)


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """The implementation of one pass, its tiles, and the reason for it.

    Attributes:
        implementation: "xla", "reference", or the kernels ("mosaic", "triton", "interpret").
        tiles: the tiles of the kernels of this pass.
        asked: the tiles that the call gives or that were tuned; the others are a table's.
        in_order: whether the sums of a backward by "mosaic" must have a deterministic order.
        reason: why this implementation.
        refused: why others do not compute the pass, by name.
    """

    implementation: str
    tiles: TileSizes = NO_TILES
    asked: TileSizes = NO_TILES
    in_order: bool = False
    reason: str = dataclasses.field(default="", compare=False)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The implementation of each pass of a call.

    Attributes:
        forward: the forward.
        backward: the backward without a gradient of the bias.
        dbias: the backward that gives the gradient of the bias, too.
        tables: the gradients of slopes and of operands of the score function.
        tangents: the tangents of the forward in queries, keys and values.
        on_gpu: whether the device is an NVIDIA GPU.
        along: how the sequence is divided over Manual mesh axes, if it is.
        method: the context parallelism that the call asks for, if any.
        replan: the plan for a part of the problem; None if it is this one.
        bias_dtype: the dtype in which the forward reads a bias that has a wider one; None if it
            has its own.
    """

    forward: PassPlan
    backward: PassPlan
    dbias: PassPlan
    tables: PassPlan
    tangents: PassPlan
    on_gpu: bool = False
    along: Along | None = None
    method: str | None = None
    replan: Callable[[Problem], "Plan"] | None = None
    bias_dtype: Any = None

    @classmethod
    def from_implementation(
        cls, implementation: str, tiles: TileSizes = NO_TILES, *, in_order: bool = False
    ):
        """Return the plan in which one implementation computes every pass."""
        every = PassPlan(implementation, tiles, in_order=in_order)
        return cls(every, every, every, every, every)

    @property
    def implementation(self) -> str:
        """The implementation of the forward."""
        return self.forward.implementation

    # Compiled here, so that calls outside of `jit` do not compile loops and kernels each time.
    @functools.partial(jax.jit, static_argnums=0)
    def run_forward(self, problem: Problem):
        """Return the output, or a `SplitOutput`, and a `LogSum` of [B, N, T]."""
        if self.bias_dtype is not None:
            problem = dataclasses.replace(problem, bias=problem.bias.astype(self.bias_dtype))
        m = partition.ROW if problem.large or self.implementation == "xla" else None
        max_logits = partition.ROW if problem.max_logits else None
        o = SplitOutput(*[partition.OUTPUT] * 2) if problem.split_output else partition.OUTPUT
        axes_out = o, LogSum(m, partition.ROW, max_logits)
        return partition.divided(self._forward, problem, axes_out=lambda _: axes_out)

    def _forward(self, problem: Problem, *, along: Along | None, again: bool = False):
        along = along or self.along
        if along is None:
            return self._forward_here(problem, again=again)

        def run(part):
            o, log_sum = self._plan_for(part)._forward_here(part, again=again)
            return o, log_sum if problem.large else log_sum.in_one()

        method = _method(problem, along, self.method)
        o, log_sum = context.forward(run, problem, along, method)
        if self.implementation == "xla" and log_sum.m is None:
            log_sum = log_sum._replace(m=jnp.zeros_like(log_sum.l_log2))
        return o, log_sum

    def _plan_for(self, part: Problem) -> "Plan":
        return self if self.replan is None else self.replan(part)

    def _forward_here(self, problem: Problem, *, again: bool):
        return self._alone(Plan._forward_alone, self.forward, problem, again=again)

    def _backward_here(self, *args, wanted: Wanted, again: bool) -> Gradients:
        plan = self._backward_for(wanted)
        return self._alone(Plan._backward_alone, plan, *args, again=again, wanted=wanted)

    def _alone(self, method: Callable, plan: PassPlan, *args, again: bool, **wanted) -> Any:
        """Run a pass on one device.

        Args:
            method: `_forward_alone` or `_backward_alone`.
            plan: of the pass.
            *args: trees of arrays.
            again: whether equal calls may share one lowered program, see `_execution.lowered_once`.
            **wanted: keywords of the method.
        """
        by = plan.implementation
        if again and by in lowered_once.PLATFORMS:
            return lowered_once.call(method, self, lowered_once.PLATFORMS[by], args, wanted)
        run = functools.partial(method, self, **wanted)
        return run(*args) if by == "xla" else on_one_device(run, *args)

    def _backward_for(self, wanted: Wanted) -> PassPlan:
        """Return the plan of the backward that gives these gradients."""
        return self.dbias if wanted.bias else self.backward

    # Compiled here, so that a ring's equal calls are traced and lowered once.
    @functools.partial(jax.jit, static_argnums=0)
    def _forward_alone(self, problem: Problem):
        if self.implementation == "xla":
            return xla.forward(problem, on_gpu=self.on_gpu)
        if self.implementation == "mosaic":
            return vmap_size.counted(self._launch_mosaic, problem)
        return _triton().forward(problem, self.forward.tiles, interpret=self._interpret)

    def _launch_mosaic(self, instances: int, problem: Problem):
        """Compute the forward by "mosaic", with tiles for all instances: the plan is for one."""
        tiles = self.forward.tiles
        if instances > 1:
            f = features_of(problem, instances)
            tiles = tile_choice.completed(self.forward.asked, problem, f, "mosaic", FORWARD)
        return _mosaic().forward(problem, tiles)

    @functools.partial(jax.jit, static_argnums=0)
    def run_tangents(self, problem: Problem, log_sum: LogSum, dots: tuple):
        """Return the tangents of the output and of the natural LSE [B, N, T], by kernels.

        `dots` are tangents of the query, the key and the value.
        """
        axes = partition.letters(problem)
        rows = jax.tree.map(lambda _: partition.ROW, log_sum)
        return partition.divided(
            self._tangents,
            problem,
            *(log_sum, dots),
            axes_of_rows=(rows, (axes.query, axes.key, axes.value)),
            axes_out=lambda _: (partition.OUTPUT, partition.ROW),
        )

    def _tangents(self, problem, log_sum, dots, *, along: Along | None, again: bool = False):
        del again  # Equal kernels are few here.
        if along is None:
            return on_one_device(self._tangents_alone, problem, log_sum, dots)
        names = "query", "key", "value"
        named, (operands, rest) = dict(zip(names, dots, strict=True)), problem.split()
        o, lse = tangents.forward_tangents(names, along, operands, rest, named)
        return o, jnp.moveaxis(lse, 2, 1)

    def _tangents_alone(self, problem, log_sum, dots):
        tile = tile_of(self.tangents.tiles, "dq")
        return _triton().tangents(problem, log_sum, dots, tile, interpret=self._interpret)

    @functools.partial(jax.jit, static_argnums=0)
    def run_backward(self, problem, o, log_sum, do, dlse, wanted: Wanted) -> Gradients:
        """Return the gradients for cotangents do [B, T, N, V] and dlse ([B, T, N] or None)."""
        outputs, rows = (
            jax.tree.map(lambda _, axes=axes: axes, x)
            for x, axes in ((o, partition.OUTPUT), (log_sum, partition.ROW))
        )
        rows = outputs, rows, partition.OUTPUT
        return partition.divided(
            functools.partial(self._backward, wanted=wanted),
            problem,
            *(o, log_sum, do, dlse),
            axes_of_rows=(*rows, None if dlse is None else partition.LSE),
            axes_out=wanted.gradient_letters,
        )

    def _backward(
        self, problem, o, log_sum, do, dlse, *, wanted: Wanted, along, again: bool = False
    ) -> Gradients:
        along, rows = along or self.along, (o, log_sum, do, dlse)
        if along is None:
            return self._backward_here(problem, *rows, wanted=wanted, again=again)

        def run(part, *rows, sinks: bool):
            only = dataclasses.replace(wanted, sinks=sinks)
            return self._plan_for(part)._backward_here(part, *rows, wanted=only, again=again)

        method = _method(problem, along, self.method)
        rows = o, log_sum if problem.large else log_sum.in_one(), do, dlse
        return context.backward(run, problem, *rows, along, wanted, method)

    @functools.partial(jax.jit, static_argnums=0)
    def _backward_alone(self, problem, o, log_sum, do, dlse, *, wanted: Wanted) -> Gradients:
        cotangents = (problem, o, log_sum, do, dlse)
        gradients = self._products(*cotangents, wanted=wanted)
        if not any(wanted.tables):
            return gradients
        slopes, *operands = self._tables(*cotangents, wanted=wanted)
        of_scores = tuple(operands) if any(wanted.score_operands) else None
        return gradients._replace(slopes=slopes, score_operands=of_scores)

    def _tables(self, problem, o, log_sum, do, dlse, *, wanted: Wanted) -> list:
        """Return the gradients of tables, by a pass of its own."""
        cotangents = (problem, o, log_sum, do, dlse, wanted.tables)
        if self.tables.implementation == "xla":
            return xla.table_gradients(*cotangents, on_gpu=self.on_gpu)
        tile = tile_of(self.tables.tiles, "dq")
        return _triton().table_gradients(*cotangents, tile, interpret=self._interpret)

    def _products(self, problem, o, log_sum, do, dlse, *, wanted: Wanted) -> Gradients:
        """Return the gradients of all operands but tables."""
        cotangents = (problem, o, log_sum, do, dlse)
        plan = self._backward_for(wanted)
        if plan.implementation == "xla":
            return xla.backward(*cotangents, **wanted.flags(), on_gpu=self.on_gpu)
        if plan.implementation == "mosaic":
            return _mosaic().backward(
                *cotangents, plan.tiles, **wanted.flags(), in_order=plan.in_order
            )
        return _triton().backward(
            *cotangents, plan.tiles, **wanted.flags(), interpret=self._interpret
        )

    @property
    def _interpret(self) -> bool:
        return self.implementation == "interpret"


def _method(problem: Problem, along: Along, asked: str | None) -> str:
    """Return the method by which devices divide a sequence."""
    return context.choose(problem, jax.lax.axis_size(along.names), asked, keys=along.keys).method


# Imported when needed, because the package works without either of Pallas's backends for GPUs.
def _mosaic():
    from pallas_flash._backends import mosaic

    return mosaic


def _triton():
    from pallas_flash._backends import triton

    return triton
