"""The plan of a call: the implementation and the tiles of each pass, with reasons.

`resolve` makes it, and `explained` puts it in words.

An explicit `implementation` is used or raises. By default the forward goes to the kernels where
they serve the call, else to "xla". Where "mosaic" and "triton" both serve it, each pass goes to the
one whose tiles the call gives, else to the one that `tuning.tune` found to be faster on the GPU
that is here, else to the one that the rules of `_selection.preferences` name.
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pallas_flash._arguments.attention import check_implementation
from pallas_flash._autodiff.vjp import splits_output
from pallas_flash._execution import limits, lowerable, tile_choice
from pallas_flash._execution.context import Choice
from pallas_flash._execution.plan import NO_TILES, PassPlan, Plan, Wanted
from pallas_flash._jax import compat, device
from pallas_flash._problem import configurations, invariance, table_gradients
from pallas_flash._problem.checks import is_number
from pallas_flash._problem.features import features_of
from pallas_flash._problem.problem import Problem
from pallas_flash._problem.tile_sizes import (
    FORWARD,
    OF_PASS,
    TileSizes,
    asked_implementation,
    describe,
    filled,
    given_tiles,
    of_implementation,
    serving,
    tile_of,
)
from pallas_flash._selection import tuned
from pallas_flash._selection.preferences import Measured, faster_by_mosaic

ONLY_ON_REQUEST = "Only on request: not known to be faster for this call."


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    Attributes:
        implementation: the one that serves the call.
        reason: why it was chosen.
        refused: why each of the others was not, by name.
        context_parallelism: the method, its `reason` and the others `refused`, where devices divide
            the sequence; else None.
        tiles: for each kernel its implementation and its tile, in words. The kernel
            "table_gradients" computes gradients of slopes and operands.
    """

    implementation: str
    reason: str
    refused: Mapping[str, str]
    context_parallelism: Choice | None = None
    tiles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.implementation}: {self.reason}"]
        lines += [f"  {kernel}: {tile}" for kernel, tile in self.tiles.items()]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        if self.context_parallelism is not None:
            method, reason, refused = self.context_parallelism
            lines += [f"{method}: {reason}", *(f"  not {x}: {why}" for x, why in refused.items())]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Request:
    """The wishes of a call about who computes it. Called with a part of its problem, it plans that.

    Attributes:
        implementation: an explicit implementation, or None.
        config: explicit tiles, or None.
        reproducible: whether gradients must be the same in every run; None follows XLA's flags.
    """

    implementation: str | None = None
    config: TileSizes | None = None
    reproducible: bool | None = None

    def __post_init__(self):
        check_implementation(self.implementation)

    def __call__(self, part: Problem) -> Plan:
        return resolve(part, self)

    @property
    def in_order(self) -> bool:
        """Whether gradients must be the same in every run."""
        if self.reproducible is None:
            return compat.xla_is_deterministic()
        return bool(self.reproducible)


def resolve(problem: Problem, request: Request) -> Plan:
    """Return the plan of a call.

    Raises:
        NotImplementedError: if an explicit implementation does not serve the call on this device.
        ValueError: if explicit tiles do not fit, or nobody takes them.
    """
    call = _Call(problem, request)
    forward = _forward(call)
    backward = _backward(call, forward.implementation)
    dbias = _dbias(call, backward)
    _check_given(request, forward, (backward, dbias))
    forward, planned = call.with_tiles(forward, FORWARD), call.backward_with_tiles(backward)

    def with_dq_tile(plan: PassPlan) -> PassPlan:
        return call.with_tiles(plan, ("dq",), of_implementation(planned.tiles, plan.implementation))

    return Plan(
        forward,
        planned,
        planned if dbias is backward else call.backward_with_tiles(dbias),
        with_dq_tile(_tables(call, backward.implementation)),
        with_dq_tile(_tangents(call, forward.implementation)),
        on_gpu=call.target.nvidia,
        replan=request,
    )


def explained(
    problem: Problem, plan: Plan, request: Request, method: Choice | None, scale: Any
) -> Explanation:
    """Return a plan in words.

    `method` says how devices share the sequence, if they do; `scale` is the call's.
    """
    forward, passes = plan.forward, (plan.forward, plan.backward)
    reasons = [forward.reason]
    if plan.backward.implementation != forward.implementation:
        reasons.append(plan.backward.reason)
    if plan.dbias.implementation != plan.backward.implementation:
        reasons.append(plan.dbias.reason)
    if plan.tables.reason:
        reasons.append(plan.tables.reason)
    if request.config is None and any(x.asked != NO_TILES for x in passes):
        reasons.append(f"Its tiles are tuned, from {tuned.file()}.")
    if request.config is not None and request.implementation is None:
        by = (x.implementation for x in passes)
        reasons += configurations.effect(request.config, *by)
    if forward.implementation != "reference" and (when := _low_part(problem, scale)) is not None:
        reasons.append(
            f"Its gradient keeps the rounding error of the output, as much memory again{when}."
        )
    if problem.batch_invariant:
        keys = invariance.block_kv(max(problem.head_dim, problem.value_dim))
        reasons.append(
            f"It is batch-invariant: {keys} keys in a block, counted from each sequence's first "
            "one, and no KV splits. That costs time without a mask and for few queries."
        )
    refused = dict(forward.refused)
    return Explanation(
        forward.implementation, " ".join(reasons), refused, method, dict(_tiles_in_words(plan))
    )


def _low_part(problem: Problem, scale: Any) -> str | None:
    """Return when the backward reads the low part of the output, in words; None if never."""
    given: dict[str, Any] = {
        x: getattr(problem, x) is not None for x in ("bias", "sinks", "slopes")
    }
    given["scale"] = scale is not None and not is_number(scale)
    if splits_output(problem, Wanted()):
        return ""
    if not splits_output(problem, Wanted(**given)):
        return None
    names = [f"`{x.replace('slopes', 'alibi_slopes')}`" for x, here in given.items() if here]
    return f", where a gradient of {' or '.join(names)} is taken"


def _tiles_in_words(plan: Plan) -> Iterator[tuple[str, str]]:
    for x in (plan.forward, plan.backward):
        for kernel, tile in given_tiles(x.tiles).items():
            yield kernel, f"{x.implementation}, {describe(tile)}"
    if tile := tile_of(plan.tables.tiles, "dq"):
        yield "table_gradients", f"{plan.tables.implementation}, {describe(tile)}"


class _Call:
    """A call that is being resolved.

    Attributes:
        problem: the call.
        request: what it asks for.
        target: the device.
        features: what the call is; None of symbolic sizes, which no kernel serves.
        limits: why "triton" and "mosaic" do not serve the call, where they do not.
        given: the tiles that it gives.
        tuned: the tiles that `tuning.tune` found for such calls on the GPU that is here.
    """

    def __init__(self, problem: Problem, request: Request):
        self.problem, self.request, self.target = problem, request, device.target()
        self.in_order = request.in_order or problem.batch_invariant
        self.limits = limits.not_on_gpu(problem, self.target)
        self.given, self.tuned = request.config or NO_TILES, NO_TILES
        self.features = None
        if not problem.symbolic:
            self.features = features_of(problem, capability=self.target.capability)
            self.given = serving(self.given, self.features.few_queries)
            if gpu := self.target.gpu_here:
                self.tuned = tuned.lookup(self.features, gpu, self._check) or NO_TILES

    def _check(self, winner: TileSizes) -> None:
        """Raise ValueError if tiles of a winner do not fit on the GPU."""
        assert self.features is not None
        for name in ("mosaic", "triton"):
            tile_choice.completed(
                of_implementation(winner, name), self.problem, self.features, name, ()
            )

    def implementation_by_tiles(self, attention_pass: str) -> tuple[str, str]:
        """Return a pass's implementation by its tiles, and why it is that; "" if no tile says."""
        if by := asked_implementation(self.given, attention_pass):
            return by, f'The call gives tile sizes, which are those of "{by}".'
        by = asked_implementation(self.tuned, attention_pass)
        return by, f'"{by}" was faster when such calls were tuned on this GPU.'

    def faster(self, *, backward: bool, dbias: bool = False) -> bool:
        """Return whether "mosaic" is known to be faster in a pass."""
        f, in_order = self.features, backward and self.in_order
        return f is not None and faster_by_mosaic(Measured(f, backward, in_order, dbias))

    def has_backward(self, implementation: str) -> bool:
        """Return whether kernels serve the backward."""
        limit = limits.backward_limit
        return implementation not in self.limits and not limit(self.problem, implementation)

    def with_tiles(
        self, plan: PassPlan, kernels: Collection[str], asked: TileSizes | None = None
    ) -> PassPlan:
        """Return the plan of a pass with tiles of some kernels, if kernels compute it.

        `asked` are the tiles that are asked for, by default the given and the tuned ones.
        """
        name, f = plan.implementation, self.features
        if name not in limits.KERNELS:
            return plan
        assert f is not None
        if asked is None:
            asked = of_implementation(self.given, name)
            if name != "interpret":
                asked = filled(asked, of_implementation(self.tuned, name))
        if name == "interpret":
            f = dataclasses.replace(f, capability=None)
        tiles = tile_choice.completed(asked, self.problem, f, name, kernels)
        return dataclasses.replace(plan, tiles=tiles, asked=asked)

    def backward_with_tiles(self, plan: PassPlan) -> PassPlan:
        """Return the plan of a backward with its tiles."""
        if plan.implementation != "mosaic":
            return self.with_tiles(plan, OF_PASS["two passes"])
        # Two passes serve every call. Where tiles are given for these alone, they are wanted.
        deciding = self.given if asked_implementation(self.given, "backward") else self.tuned
        two_passes = (
            deciding.backward is None and asked_implementation(deciding, "backward") == "mosaic"
        )
        if not two_passes:
            one_pass = self.with_tiles(plan, ("backward",))
            if one_pass.tiles.backward is not None:
                return dataclasses.replace(one_pass, in_order=self.in_order)
        return dataclasses.replace(self.with_tiles(plan, ("dkv", "dq")), in_order=True)


def _forward(call: _Call) -> PassPlan:
    """Return the implementation of the forward, which serves the whole call."""
    asked, refused = call.request.implementation, dict(call.limits)
    if call.problem.batch_invariant:
        _check_invariance(call)
    # Where no kernel is going to run, its language is not even looked for: importing it takes time.
    unserved = limits.interpreter_limits(call.problem, look_for_triton=asked == "interpret")
    refused["interpret"] = unserved or "Only on request: it is for tests, and slow."
    refused["reference"] = "Only on request: its memory grows with T * S."
    if asked is None:
        chosen, reason, why_not = _default_forward(call)
        refused |= why_not
    else:
        chosen, reason = asked, "asked for."
        why = {"interpret": unserved}.get(asked)
        if asked in ("mosaic", "triton"):
            why = refused.get(asked)
        if why:
            other = "triton" if asked == "mosaic" and "triton" not in refused else "xla"
            raise NotImplementedError(
                f"`implementation` must be one that serves the call; got {asked!r}. "
                f'{why} Use "{other}".'
            )
        for name in ("mosaic", "triton", "xla"):
            refused.setdefault(name, f"{asked!r} was asked for.")
    refused.pop(chosen, None)
    return PassPlan(chosen, reason=reason, refused=refused)


def _check_invariance(call: _Call) -> None:
    """Raise unless the call can be batch-invariant."""
    if call.request.reproducible is not None and not call.request.reproducible:
        raise ValueError(
            "`reproducible` must be None or True with `batch_invariant=True`, which turns it on; "
            "got False. Drop one of the two."
        )
    invariance.check_documents(call.problem)
    limits.check_invariance(call.request.implementation, call.limits.get("mosaic", ""))


def _default_forward(call: _Call) -> tuple[str, str, dict[str, str]]:
    """Return the forward's default implementation, why, and why others that serve it do not."""
    serving = [name for name in ("mosaic", "triton") if name not in call.limits]
    if not serving:
        return "xla", "the fastest that serves this call on this device.", {}
    (by, why), why_not = call.implementation_by_tiles("forward"), {}
    reasons = {
        "mosaic": "the kernels for Hopper serve this call.",
        "triton": "the kernels serve this call on this GPU.",
    }
    if call.problem.batch_invariant:
        chosen, why_not["triton"] = "mosaic", "Its rows depend on the batch."
    elif len(serving) == 1:
        [chosen] = serving
    elif by:
        chosen, why_not["triton" if by == "mosaic" else "mosaic"] = by, why
    elif call.faster(backward=False):
        chosen, why_not["triton"] = "mosaic", "Slower than the kernels for Hopper."
        reasons["mosaic"] = "the kernels for Hopper serve this call, faster than Triton's."
    else:
        chosen, why_not["mosaic"] = "triton", ONLY_ON_REQUEST
    why_not["xla"] = "Slower than the kernels, which serve this call."
    return chosen, reasons[chosen], why_not


def _backward(call: _Call, forward: str) -> PassPlan:
    """Return the implementation of the backward, if `forward` computes the forward."""
    limit = limits.backward_limit(call.problem, forward)
    by, why_not = call.implementation_by_tiles("backward")
    faster = not by and call.faster(backward=True)
    default = call.request.implementation is None

    def other(name: str, why: str) -> PassPlan:
        reason = f'"{name}" computes the backward: {why}'
        return PassPlan(name, reason=reason, refused={forward: why})

    wanted = by == "mosaic" or faster or limit
    if default and forward == "triton" and wanted and call.has_backward("mosaic"):
        return other("mosaic", limit or ("it is faster." if faster else _continued(why_not)))
    if limit:
        serves = forward == "mosaic" and call.has_backward("triton")
        return other("triton" if serves else "xla", limit)
    if default and forward == "mosaic" and call.has_backward("triton"):
        if by == "triton":
            return other("triton", _continued(why_not))
        if not by and not faster:
            how = "reproducible one" if call.in_order else "one"
            why = f"the {how} for Hopper is not known to be faster for this call."
            return other("triton", why)
    return PassPlan(forward, reason="the forward is by the same.")


def _continued(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _dbias(call: _Call, backward: PassPlan) -> PassPlan:
    """Return the implementation of a backward that gives the gradient of the bias, too."""
    features, by = call.features, backward.implementation
    given = asked_implementation(call.given, "backward")
    if call.problem.bias is None or call.request.implementation is not None or given:
        return backward
    shared = features is not None and features.bias_is_shared
    faster = shared and call.faster(backward=True, dbias=True)

    def other(name: str, why: str) -> PassPlan:
        reason = f'A gradient of the bias comes with the backward of "{name}": {why}'
        return PassPlan(name, reason=reason, refused={by: why})

    if by == "mosaic" and not faster and call.has_backward("triton"):
        return other("triton", "that for Hopper is not known to be faster with it.")
    if by == "triton" and faster and call.has_backward("mosaic"):
        return other("mosaic", "it is faster.")
    return backward


def _tables(call: _Call, backward: str) -> PassPlan:
    """Return the implementation of gradients of tables, if `backward` computes the others."""
    kernels = backward in limits.KERNELS
    if not (reads := table_gradients.reads_of(call.problem.scores) if kernels else ()):
        return PassPlan("xla")

    def other(name: str, why: str) -> PassPlan:
        return PassPlan(name, reason=f'"{name}" computes gradients of slopes or operands: {why}')

    if (number := next((x.table for x in reads if x.by_pair), None)) is not None:
        why = (
            f"Operand {number - 1} is read at q_pos and k_pos other than at q_pos - k_pos, and the "
            "kernel has no sums for that. An array for pairs is better a `bias`."
        )
        return other("xla", why)
    if backward == "mosaic" and "triton" in call.limits:
        return other("xla", call.limits["triton"])
    if backward != "interpret" and (why := lowerable.reads_limit(call.problem)):
        return other("xla", why)
    if backward == "mosaic":
        return other("triton", '"mosaic" has no kernel for it.')
    return PassPlan(backward)


def _tangents(call: _Call, forward: str) -> PassPlan:
    """Return the implementation of tangents of q, k and v, if `forward` computes o."""
    by = "triton" if forward == "mosaic" else forward
    return PassPlan(by if by in limits.KERNELS and call.has_backward(by) else "xla")


def _check_given(request: Request, forward: PassPlan, backward: Iterable[PassPlan]) -> None:
    """Raise if the call gives tiles to an implementation that does not compute that pass."""
    sizes, asked = request.config, request.implementation
    if sizes is None or asked is None:
        return
    for kernel, tile in given_tiles(sizes).items():
        by = {x.implementation for x in ([forward] if kernel in FORWARD else backward)}
        if not any(tile_of(of_implementation(sizes, name), kernel) for name in by):
            raise ValueError(
                f"`config.{kernel}` must be a tile of that pass's implementation, "
                f"{' or '.join(map(repr, sorted(by)))}; got {tile} with "
                f'implementation={asked!r}. Give "mosaic" its tiles of pallas_flash.tuning, and '
                "others a pallas_flash.tuning.Tile."
            )


_warned: set[str] = set()


def warn_of_fallback(plan: Plan, asked: str | None) -> None:
    """Say, once for each reason, that a call on an NVIDIA GPU is not served by the kernels.

    `attention` calls this, and has one wrapper: the warning points to the user's line.
    """
    chosen = plan.forward.implementation
    if asked is not None or chosen in ("mosaic", "triton") or not plan.on_gpu:
        return
    reason = plan.forward.refused["triton"]
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f'pallas_flash.attention falls back to the slower "{chosen}": {reason}',
            stacklevel=4,
        )
