"""The custom derivatives; the only place that knows residuals.

The first one is a `custom_vjp` of two passes, forward and backward. Each of them is a `custom_jvp`
with a tangent in plain JAX, from which every higher order comes, in both modes.

Residuals are the operands, the output and the LSE as a `LogSum`; delta is the backward's own. The
output and the LSE carry checkpoint names, so that a remat policy, `save_residuals`, can keep them
and never run the forward twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from pallas_flash import _compat, _context, _instances, _partition, _tangents, _xla
from pallas_flash._one_device import on_one_device
from pallas_flash._partition import Along
from pallas_flash._problem import Gradients, Problem
from pallas_flash._scores import LN2, LogSum
from pallas_flash._tiling import choose
from pallas_flash._tiling.sizes import TileSizes

# The checkpoint names of the output and of the LSE, and the policy that saves both.
NAMES = "pallas_flash_out", "pallas_flash_lse"
_save_names = jax.checkpoint_policies.save_only_these_names(*NAMES)


def save_residuals(*args, **kwargs):
    """A policy of `jax.checkpoint` that saves what `attention`'s backward needs of its forward.

    These are the output, as large as the queries, and one float32 a query and head, or two. With
    them the forward kernel does not run again in the backward pass; everything else is computed
    again. Join it with other policies by `jax.checkpoint_policies.save_from_both_policies`.

    Args:
        *args: what `jax.checkpoint` passes to a policy.
        **kwargs: likewise.

    Example:
        >>> import jax, jax.numpy as jnp, pallas_flash
        >>> def layer(x):
        ...     return x + pallas_flash.attention(x, x, x, is_causal=True)
        >>> layer = jax.checkpoint(layer, policy=pallas_flash.save_residuals)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones((1, 8, 2, 16))).shape
        (1, 8, 2, 16)
    """
    return _save_names(*args, **kwargs)


# The operands that have no gradient, and what `attention` calls them.
NO_GRADIENT = {"slopes": "alibi_slopes", "score_operands": "ScoreMod.operands"}

NO_TILES = TileSizes()

# With Auto axes JAX lowers every call of a program anew while XLA compiles it. For kernels that
# takes long, and names that count make them different, so that each is compiled, too: those of
# these implementations are lowered once, for a platform, and calls get the result.
EXPORTED = {"mosaic": "cuda"}
KERNELS = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """Who computes one pass, with which tiles, and why.

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
    """Who computes each pass of a call.

    Attributes:
        forward: the forward.
        backward: the backward without a gradient of the bias.
        dbias: the backward that gives the gradient of the bias, too.
        on_gpu: whether "xla" computes on a GPU.
        along: how the sequence is divided over Manual mesh axes, if it is.
        method: by which a sequence that is divided is computed, if the call says so.
        of_part: the plan for a part of the problem; None if it is this one.
    """

    forward: PassPlan
    backward: PassPlan
    dbias: PassPlan
    on_gpu: bool = False
    along: Along | None = None
    method: str | None = None
    of_part: Callable[[Problem], "Plan"] | None = None

    @classmethod
    def by(cls, implementation: str, tiles: TileSizes = NO_TILES, *, in_order: bool = False):
        """Return the plan in which one implementation computes every pass."""
        every = PassPlan(implementation, tiles, in_order=in_order)
        return cls(every, every, every)

    @property
    def implementation(self) -> str:
        """The implementation of the forward."""
        return self.forward.implementation

    # Compiled here, so that calls outside of `jit` do not compile loops and kernels each time.
    @functools.partial(jax.jit, static_argnums=0)
    def run_forward(self, problem: Problem):
        """Return the output and a `LogSum` of [B, N, T]."""
        m = _partition.ROW if problem.large or self.implementation == "xla" else None
        axes_out = _partition.OUTPUT, LogSum(m, _partition.ROW)
        return _partition.divided(self._forward, problem, axes_out=lambda _: axes_out)

    def _forward(self, problem: Problem, *, along: Along | None, again: bool = False):
        along = along or self.along
        if along is None:
            return self._alone("_forward_alone", problem, again=again)

        def run(part):
            o, log_sum = self._for(part)._alone("_forward_alone", part, again=again)
            return o, log_sum if problem.large else log_sum.in_one()

        method = _method(problem, along, self.method)
        o, log_sum = _context.forward(run, problem, along, method)
        if self.implementation == "xla" and log_sum.m is None:
            log_sum = log_sum._replace(m=jnp.zeros_like(log_sum.l_log2))
        return o, log_sum

    def _for(self, part: Problem) -> "Plan":
        return self if self.of_part is None else self.of_part(part)

    def _alone(self, name: str, *args, again: bool, **wanted) -> Any:
        """`_forward_alone` or `_backward_alone`; `again` if programs of their own call it alike."""
        plan = self.forward if name == "_forward_alone" else self._backward_for(**wanted)
        by = plan.implementation
        run = functools.partial(getattr(self, name), **wanted)
        if not (again and by in EXPORTED):
            return run(*args) if by == "xla" else on_one_device(run, *args)
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        # Which floats there are says whether JAX is in x64 mode.
        asked = tuple(wanted.items()), jnp.result_type(float)
        exported = _exported(self, name, EXPORTED[by], *asked, tree, shapes)
        return (run if exported is None else exported)(*args)

    def _backward_for(self, wanted: "Wanted") -> PassPlan:
        """Return the plan of the backward that gives these gradients."""
        return self.dbias if wanted.bias else self.backward

    # Compiled here, so that a ring's equal calls are traced and lowered once.
    @functools.partial(jax.jit, static_argnums=0)
    def _forward_alone(self, problem: Problem):
        if self.implementation == "xla":
            return _xla.forward(problem, on_gpu=self.on_gpu)
        if self.implementation == "mosaic":
            return _instances.counted(self._launch_mosaic, problem)
        return _triton().forward(problem, self.forward.tiles, interpret=self._interpret)

    def _launch_mosaic(self, instances: int, problem: Problem):
        """Compute the forward by "mosaic", of so many instances: the plan was made for one."""
        tiles = self.forward.tiles
        if instances > 1:
            tiles = choose.for_launch(problem, instances, self.forward.asked)
        return _mosaic().forward(problem, tiles)

    @functools.partial(jax.jit, static_argnums=0)
    def run_backward(self, problem, o, log_sum, do, dlse, wanted: "Wanted") -> Gradients:
        """Return the gradients for cotangents do [B, T, N, V] and dlse ([B, T, N] or None)."""
        rows = jax.tree.map(lambda _: _partition.ROW, log_sum)
        rows = _partition.OUTPUT, rows, _partition.OUTPUT
        return _partition.divided(
            functools.partial(self._backward, wanted=wanted),
            problem,
            *(o, log_sum, do, dlse),
            axes_of_rows=(*rows, None if dlse is None else _partition.LSE),
            axes_out=lambda axes: Gradients(
                *(
                    getattr(axes, name) if getattr(wanted, name, name not in NO_GRADIENT) else None
                    for name in Gradients._fields
                )
            ),
        )

    def _backward(
        self, problem, o, log_sum, do, dlse, *, wanted: "Wanted", along, again: bool = False
    ) -> Gradients:
        along, name = along or self.along, "_backward_alone"
        if along is None:
            return self._alone(name, problem, o, log_sum, do, dlse, wanted=wanted, again=again)

        def run(part, *rows, sinks: bool):
            only = dataclasses.replace(wanted, sinks=sinks)
            return self._for(part)._alone(name, part, *rows, wanted=only, again=again)

        log_sum = log_sum if problem.large else log_sum.in_one()
        method = _method(problem, along, self.method)
        rows = o, log_sum, do, dlse
        return _context.backward(run, problem, *rows, along, wanted, method)

    @functools.partial(jax.jit, static_argnums=0)
    def _backward_alone(self, problem, o, log_sum, do, dlse, *, wanted: "Wanted") -> Gradients:
        cotangents = (problem, o, log_sum, do, dlse)
        plan = self._backward_for(wanted)
        if plan.implementation == "xla":
            return _xla.backward(*cotangents, **wanted.flags(), on_gpu=self.on_gpu)
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


@functools.lru_cache(64)
def _exported(plan: Plan, name: str, platform: str, wanted, floats, tree, shapes):
    """A function that is a pass on one device, lowered; None where JAX does not let it be."""
    del floats  # Traces differ by it.
    checks = map(jax.export.DisabledSafetyCheck.custom_call, KERNELS)
    run = functools.partial(getattr(plan, name), **dict(wanted))
    export = jax.export.export(jax.jit(run), platforms=(platform,), disabled_checks=tuple(checks))
    with _compat.not_for_older_jax():
        exported = export(*jax.tree.unflatten(tree, shapes))
    # It may say how scalars lie, which XLA does not take in a part.
    return None if "sdy." in exported.mlir_module() else exported.call


def _method(problem: Problem, along: Along, asked: str | None) -> str:
    """By which a device's part is computed."""
    return _context.choose(problem, jax.lax.axis_size(along.names), asked, keys=along.keys).method


# Imported when needed: the package works without either of Pallas's ways to a GPU.
def _mosaic():
    from pallas_flash import _mosaic

    return _mosaic


def _triton():
    from pallas_flash import _triton

    return _triton


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which of the gradients that cost something extra are asked for."""

    scale: bool = False
    bias: bool = False
    sinks: bool = False

    def flags(self) -> dict[str, bool]:
        """As keywords of the backwards."""
        return {f"want_{name}": wanted for name, wanted in vars(self).items()}


def attend(plan: Plan, operands: dict, rest: Problem):
    """The output [B, T, N, V] and the natural LSE [B, T, N] of what `Problem.split` gave."""
    kinds = jax.typeof(operands["query"]).sharding.mesh.axis_types
    if all(kind == AxisType.Auto for kind in kinds):
        return _attend_on_mesh(plan, operands, rest)
    # Outside of `jit` JAX has no rule for what is differentiated here inside a `shard_map`.
    return _attend_compiled(plan, operands, rest)


def _attend_on_mesh(plan: Plan, operands: dict, rest: Problem):
    def attend(problem, along):
        here = plan if along is None else dataclasses.replace(plan, along=along)
        operands, rest = _compat.vary_alike(problem.split())
        return _attend(here, _in_reverse_mode(here, operands), rest)

    return _partition.explicitly(attend, rest.join(operands))


_attend_compiled = jax.jit(_attend_on_mesh, static_argnums=0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_reverse_mode(plan: Plan, operands):
    """The operands, whose tangents can be transposed and not computed."""
    return operands


@functools.partial(_in_reverse_mode.defjvp, symbolic_zeros=True)
def _(plan: Plan, primals, tangents):
    tangents, structure = jax.tree.flatten(tangents[0])
    moved = iter(_to_transpose.bind(*filter(_is_moved, tangents), by=plan.implementation))
    tangents = [next(moved) if _is_moved(t) else t for t in tangents]
    return primals[0], jax.tree.unflatten(structure, tangents)


def _is_moved(tangent) -> bool:
    return not isinstance(tangent, SymbolicZero)


# The identity on tangents. All together, because those that are known to be zero may come along.
_to_transpose = Primitive("pallas_flash_reverse_mode")
_to_transpose.multiple_results = True
_to_transpose.def_abstract_eval(lambda *tangents, by: tangents)


@_to_transpose.def_impl
def _forward_mode(*tangents, by: str):
    raise NotImplementedError(
        f"`attention` must be differentiated in reverse mode by {by!r}; got a tangent of its "
        "operands, from `jax.jvp`, `jax.jacfwd` or `jax.linearize`. Use `jax.grad` or `jax.vjp`, "
        'of which forward mode works, or implementation="reference".'
    )


def _batched(tangents, dims, *, by: str):
    return _to_transpose.bind(*tangents, by=by), dims


mlir.register_lowering(_to_transpose, lambda _, *tangents, by: _forward_mode(by=by))
batching.primitive_batchers[_to_transpose] = _batched
ad.deflinear2(_to_transpose, lambda cotangents, *tangents, by: cotangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_pass(plan: Plan, operands, rest):
    return plan.run_forward(rest.join(operands))


@functools.partial(_forward_pass.defjvp, symbolic_zeros=True)
def _(plan: Plan, primals, tangents):
    operands, rest = primals
    moved = _moved(plan, tangents[0])
    o_dot, lse_dot = _tangents.of_forward(tuple(moved), plan.along, operands, rest, moved)
    o, log_sum = _forward_pass(plan, operands, rest)
    # Of its two terms the sum alone has a meaning.
    m_dot = None if log_sum.m is None else jnp.zeros_like(log_sum.m)
    return (o, log_sum), (o_dot, LogSum(m_dot, jnp.moveaxis(lse_dot, 2, 1) / LN2))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward_pass(plan: Plan, wanted: Wanted, operands, rest, o, log_sum, do, dlse):
    return plan.run_backward(rest.join(operands), o, log_sum, do, dlse, wanted)


@functools.partial(_backward_pass.defjvp, symbolic_zeros=True)
def _(plan: Plan, wanted: Wanted, primals, tangents):
    operands, rest, _, _, *cotangents = primals
    gradients = _backward_pass(plan, wanted, *primals)
    names = tuple(name for name, x in gradients._asdict().items() if x is not None)
    moved = _moved(plan, tangents[0])
    cotangents_dot = [
        jnp.zeros_like(x) if isinstance(t, SymbolicZero) else t
        for x, t in zip(cotangents, tangents[4:], strict=True)
    ]
    return gradients, _tangents.of_backward(
        tuple(moved), names, plan.along, operands, rest, cotangents, (moved, cotangents_dot)
    )


def _moved(plan: Plan, tangents: dict) -> dict:
    """The tangents of those operands that have one."""
    moved = {}
    for name, tree in tangents.items():
        if all(isinstance(t, SymbolicZero) for t in jax.tree.leaves(tree)):
            continue
        if name in NO_GRADIENT:
            raise _no_gradient(name, plan)
        moved[name] = tree
    return moved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, operands, rest):
    o, log_sum = _forward_pass(plan, operands, rest)
    return o, _public_lse(log_sum)


def _forward(plan: Plan, operands, rest):
    def perturbed(name):
        return any(x.perturbed for x in jax.tree.leaves(operands[name], is_leaf=_has_tangent))

    for name in NO_GRADIENT:
        if perturbed(name):
            raise _no_gradient(name, plan)
    wanted = Wanted(*map(perturbed, ("scale", "bias", "sinks")))
    operands, rest = jax.tree.map(lambda x: x.value, (operands, rest), is_leaf=_has_tangent)
    o, log_sum = _forward_pass(plan, operands, rest)
    o = checkpoint_name(o, NAMES[0])
    log_sum = jax.tree.map(lambda x: checkpoint_name(x, NAMES[1]), log_sum)
    return (o, _public_lse(log_sum)), (operands, rest, o, log_sum, wanted)


def _no_gradient(name: str, plan: Plan) -> NotImplementedError:
    return NotImplementedError(
        f"`{NO_GRADIENT[name]}` must not be differentiated by {plan.implementation!r}, which has "
        "no gradient for it; got a derivative with respect to it. Wrap it in "
        '`jax.lax.stop_gradient`, or use implementation="reference".'
    )


def _has_tangent(x) -> bool:
    return hasattr(x, "perturbed")


def _backward(plan: Plan, residuals, cotangents):
    operands, rest, o, log_sum, wanted = residuals
    do, dlse = cotangents
    if isinstance(do, SymbolicZero):
        do = jnp.zeros_like(o)
    if isinstance(dlse, SymbolicZero):
        dlse = None
    gradients = _backward_pass(plan, wanted, operands, rest, o, log_sum, do, dlse)
    # None stands for a zero, as it does for everything in `rest`: masks, lengths and ids have no
    # gradient.
    return gradients._asdict(), None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _public_lse(log_sum: LogSum):
    return jnp.moveaxis(log_sum.lse, 1, 2)
