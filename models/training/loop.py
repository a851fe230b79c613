"""Training: the model as functions, the gradient check, the update, the loop, the run."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from models import Decoder, lora
from models.config import DecoderConfig
from models.errors import UserError
from models.loss import summed_loss
from models.sharding import Layout
from models.training import processes
from models.training.conversations import load_conversations
from models.training.folder import RunFolder
from models.training.mesh import check_memory, count_of, make_layout
from models.training.processes import is_writer, say, warn
from models.training.report import (
    Speed,
    Work,
    bits_of,
    describe,
    metric_lines,
    program_bytes,
    work_of,
)
from models.training.settings import TrainConfig, model_config
from models.training.text import Text, check_tokens, held_out_batches, load_text, training_batch
from models.training.weights import dtype_of, replaced, tokenizer_files, write_weights

# Largest relative error of a parameter's gradient, both sides in float32 with exact products. Only
# the order of sums differs, which gives about 1e-6.
GRADIENT_BOUND = 1e-4
# Longest context of the gradient check: the reference's memory is quadratic in it.
GRADIENT_CONTEXT = 1024
# Seconds after which a log gets a line.
LOG_SECONDS = 30
# AdamW's decay rate of the gradient's square, the largest global norm of the gradient, and the
# share of the peak learning rate at the end.
BETA2, CLIP_NORM, FINAL_RATE = 0.95, 1.0, 0.1


class TrainState(NamedTuple):
    """The state of training.

    Attributes:
        step: Number of updates done.
        params: The parameters that updates change.
        opt_state: The optimizer's moments of them.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def model_functions(model: DecoderConfig, seed: int, layout: Layout):
    """Return `init() -> params`, and `loss_fn(params, batch)`, which is `summed_loss`.

    `init` should run uncompiled: op by op, each of its few shapes compiles once. XLA for GPUs takes
    minutes for all random numbers of a large model as one program.
    """
    # The comparison with the reference must not depend on the division.
    shared = layout.mesh.size > 1 and model.implementation != "reference"

    def make():
        attention = layout.attention if shared else None
        return Decoder(model, rngs=nnx.Rngs(seed), layout=layout, attention=attention)

    graphdef = nnx.graphdef(nnx.eval_shape(make))

    def loss_fn(params, batch):
        batch = batch._replace(tokens=batch.tokens.astype(jnp.int32))
        return summed_loss(nnx.merge(graphdef, params), *batch)

    return lambda: nnx.to_pure_dict(nnx.state(make())), loss_fn


def first_params(config: TrainConfig, model: DecoderConfig, layout: Layout):
    """Return the parameters that a run begins with.

    Raises:
        UserError: A tensor of the weights is missing, unexpected, of another shape, or damaged.
    """
    if config.init_from is None:
        return model_functions(model, config.seed, layout)[0]()
    try:
        read = Decoder.from_pretrained(config.weights, layout=layout, param_dtype=model.param_dtype)
    except ValueError as error:
        said = str(error).replace("`folder`", "`init_from`").replace("`layout`", "`mesh`")
        raise UserError(said) from None
    return nnx.to_pure_dict(nnx.state(read, nnx.Param))


def new_adapter(config: TrainConfig, model: DecoderConfig, params: Any) -> Any:
    """Return the adapter that a run begins with; of the parameters it needs the shapes.

    Raises:
        UserError: A target is no matrix of the model, or the rank is above the size of one.
    """
    targets = None if config.lora_targets is None else config.lora_targets.split(",")
    key = jax.random.key(config.seed)
    try:
        return lora.init(key, model, params, config.lora_rank or 0, targets)
    except ValueError as error:
        said = str(error).replace("`targets`", "`lora_targets`").replace("`rank`", "`lora_rank`")
        raise UserError(said) from None


# --------------------------------------------------------------------------------------- updates


def make_optimizer(config: TrainConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return AdamW behind a global clip, and its schedule as a function of the updates done."""
    warmup_cosine = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * FINAL_RATE,
    )

    def schedule(count):
        # The rate at zero is zero, and the first update would have no effect.
        return warmup_cosine(count + 1)

    adamw = optax.adamw(
        schedule,
        b2=BETA2,
        weight_decay=config.weight_decay,
        # Decay of a norm's scale does not regularise.
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw), schedule


def mean_gradient(loss_fn, params, batch):
    """Return loss and gradient over a batch, `[parts, microbatch, ...]`, one part at a time."""

    def add_part(total, part):
        part = jax.value_and_grad(loss_fn, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, total, part), None

    zeros = jax.tree.map(jnp.zeros_like, ((jnp.zeros(()), jnp.zeros(())), params))
    ((loss, count), gradient), _ = jax.lax.scan(add_part, zeros, batch)
    # Parts may differ in the number of tokens that carry loss.
    return loss / count, jax.tree.map(lambda x: (x / count).astype(x.dtype), gradient)


def compiler_options(layout: Layout) -> dict[str, bool | int] | None:
    """Return the options for XLA on GPUs.

    The first two keep matrix products in cuBLAS, as they are written: else XLA cuts sums over
    tokens, and joins q's product with k's. The others let devices send while they compute; by
    default the first message that is ready would overlap all products of the backward.
    """
    if jax.default_backend() != "gpu":
        return None
    options: dict[str, bool | int] = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
    if layout.mesh.size > 1:
        options |= {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_experimental_parallel_collective_overlap_limit": 16,
        }
    return options


def make_steps(config: TrainConfig, model: DecoderConfig, layout: Layout):
    """Return `init_state(params)`, `train_step(state, batch)` and `eval_step(params, batches)`.

    Without parameters, the state begins with random ones. The parameters of an adapter have those
    that it tunes beside them: the last argument of both steps, which no update changes.
    """
    init_model, model_loss = model_functions(model, config.seed, layout)
    optimizer, schedule = make_optimizer(config)

    def init():
        params = init_model()
        return params if config.lora_rank is None else new_adapter(config, model, params)

    def loss_with(frozen):
        def loss_fn(adapter, batch):
            return model_loss(lora.merged(model, frozen, adapter, config.alpha), batch)

        return model_loss if frozen is None else loss_fn

    def begin(params):
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    places = layout.shardings(jax.eval_shape(lambda: begin(init())))

    def init_state(params=None):
        return jax.jit(begin, out_shardings=places)(init() if params is None else params)

    # Donation lets the new state take the place of the old one in memory.
    @functools.partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=(places, layout.sharding()),
        compiler_options=compiler_options(layout),
    )
    def train_step(state, batch, frozen=None):
        value, gradient = mean_gradient(loss_with(frozen), state.params, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "lr": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state), metrics

    @functools.partial(jax.jit, out_shardings=layout.sharding())
    def eval_step(params, batches, frozen=None):
        losses, counts = jax.lax.map(functools.partial(loss_with(frozen), params), batches)
        return jnp.sum(losses) / jnp.sum(counts)

    return init_state, train_step, eval_step


# --------------------------------------------------------------------------------- gradient check


def gradient_error(
    config: TrainConfig, model: DecoderConfig, text: Text, layout: Layout
) -> tuple[float, str]:
    """Compare the gradient of the whole model with the one through the dense reference.

    Both are computed at the initial parameters on a few sequences, in float32 with full-precision
    products: the errors of TF32, a GPU's default, and of bfloat16, a run's default, would hide an
    error of the attention.

    Returns:
        The largest error of a parameter, `|ours - reference| / |reference|` in the L2 norm, and
        the name of that parameter.
    """
    sizes = layout.mesh.shape
    whole, shares = sizes["sequence"], sizes["data"] * sizes["fsdp"]
    context = max(min(config.context, GRADIENT_CONTEXT) // whole, 1) * whole
    exact = dict(dtype="float32", param_dtype="float32", batch_invariant=False)
    model = dataclasses.replace(model, **exact)
    check = dataclasses.replace(config, context=context, batch_size=max(2, shares), accumulation=1)
    # All tokens carry loss, because the first ones of a long conversation may be no answer.
    batch = training_batch(text, 1, check, layout)._replace(answers=None)
    params = first_params(config, model, layout)
    # A search for the fastest matrix products of a GPU is not worth its time for one run.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None

    def gradient(implementation):
        chosen = dataclasses.replace(model, implementation=implementation)
        loss_fn = model_functions(chosen, config.seed, layout)[1]
        places = layout.shardings(params)
        options = dict(out_shardings=places, compiler_options=quick)
        return jax.jit(lambda *x: mean_gradient(loss_fn, *x)[1], **options)(params, batch)

    # Kernels for Hopper take no float32, so others are checked in their place.
    ours = None if model.implementation == "mosaic" else model.implementation
    with jax.default_matmul_precision("highest"):
        ours, reference = gradient(ours), gradient("reference")

    @functools.partial(jax.jit, out_shardings=layout.sharding())
    def relative(ours, reference):
        norm = jnp.linalg.norm
        return jax.tree.map(lambda a, b: norm(a - b) / norm(b), ours, reference)

    errors = jax.tree.leaves_with_path(jax.device_get(relative(ours, reference)))
    return max(
        # A gradient that is not a number must win.
        (np.inf if np.isnan(error) else float(error), jax.tree_util.keystr(path))
        for path, error in errors
        # The gradient of a bias of keys is zero without rotary positions, and else a small sum of
        # large numbers.
        if not jax.tree_util.keystr(path, simple=True, separator="/").endswith("key/bias")
    )


def check_gradients(run: "Run") -> float:
    """Print the end-to-end gradient error, and stop the run if it is too large."""
    say("gradients", "are compared with the dense reference's: compiling two programs")
    start = time.perf_counter()
    error, name = gradient_error(*run[:2], run.text, run.layout)
    got = f"relative error {error:.1e} against the reference (worst parameter: {name}; "
    say("gradients", f"{got}bound {GRADIENT_BOUND:.0e}; {time.perf_counter() - start:.1f} s)")
    if not error <= GRADIENT_BOUND:
        raise UserError(
            f"`attention` must give the reference's gradients to within {GRADIENT_BOUND:.0e}; got "
            f"a relative error of {error:.1e} at {name}: its gradients are wrong here, so try "
            "another --attention, and please report it."
        )
    return error


# -------------------------------------------------------------------------------------- the loop


def run_steps(run: "Run", folder: RunFolder, state: TrainState, frozen: Any, stopped: list):
    """Update the state until the last step, or until `stopped` has an entry.

    Args:
        run: The run.
        folder: Its folder.
        state: The state.
        frozen: The parameters that an adapter tunes; None without one.
        stopped: Filled by a signal.

    Returns:
        The state, and the mean speed.
    """
    config, layout, text = run.config, run.layout, run.text
    _, train_step, eval_step = make_steps(config, run.model, layout)
    first, start = int(state.step), time.perf_counter()
    batch = training_batch(text, first + 1, config, layout)
    held_out = held_out_batches(text, config, layout)
    say("compiling", "an update and an evaluation")
    # Compiled here, so that no step's time includes compilation.
    train_step = train_step.lower(state, batch, frozen).compile()
    eval_step = eval_step.lower(state.params, held_out, frozen).compile()
    seconds, needed = time.perf_counter() - start, program_bytes(train_step) / 1e9
    say("compiled", f"in {seconds:.1f} s; a step takes {needed:.2f} GB a device")

    # Only a terminal shows the bar (disable=None). A log gets lines after LOG_SECONDS, too.
    hidden = None if is_writer() else True
    progress = tqdm(total=config.steps, initial=first, unit="step", disable=hidden)
    vote = processes.Vote(layout, stopped)
    pending, seconds = [], 0.0
    start = printed = time.perf_counter()
    with progress:
        for step in range(first + 1, config.steps + 1):
            batch = training_batch(text, step, config, layout)
            state, metrics = train_step(state, batch, frozen)
            pending.append(metrics)
            progress.update()
            stop = vote()
            look = step % config.eval_every == 0 or step == config.steps
            save = step % config.checkpoint_every == 0 or step == config.steps or stop
            due = time.perf_counter() - printed > LOG_SECONDS
            if not (look or save or due or step % config.log_every == 0):
                continue

            # Reading the values waits for the device, to which the loop only sends steps.
            values = jax.device_get(pending)
            elapsed = time.perf_counter() - start
            seconds += elapsed
            speed = run.work.speed(1e3 * elapsed / len(pending))
            val_loss = float(eval_step(state.params, held_out, frozen)) if look else None
            bits = None if val_loss is None else text.bits_per_byte(val_loss)
            lines = metric_lines(step, values, speed, val_loss, bits)
            if is_writer() and (look or (due and progress.disable)):
                more = f"{progress.format_interval((config.steps - step) * speed.ms / 1e3)} left"
                if look:
                    more = f"held out {val_loss:.4f}{bits_of(bits)}"
                progress.write(f"step {step:6d}   loss {lines[-1]['loss']:.4f}   {more}   {speed}")
            if look or due:
                printed = time.perf_counter()
            # The lines come first, so that a checkpoint has all the steps before it.
            folder.append(lines)
            if save or (look and folder.best_step() == step):
                folder.save(step, state)
            if stop:
                break
            pending, start = [], time.perf_counter()
    return state, run.work.speed(1e3 * seconds / (int(state.step) - first))


# --------------------------------------------------------------------------------------- the run


class Result(NamedTuple):
    """The result of a run.

    Losses are in nats per token; they are None without an evaluation, or if damaged metrics have
    lost them.

    Attributes:
        step: Updates done, over all the sessions of the run.
        loss: Training loss of the last update, in process 0.
        val_loss: Last loss on the held-out text.
        bits_per_byte: The same in bits for a byte of that text; None for conversations, too.
        gradient_error: Error of the gradient check; None without a check.
        speed: Mean speed of this session's updates; None without one.
        interrupted: Whether a signal ended the session before the run's last step.
    """

    step: int
    loss: float | None
    val_loss: float | None
    bits_per_byte: float | None
    gradient_error: float | None
    speed: Speed | None
    interrupted: bool


class Run(NamedTuple):
    """The settings, the model, the devices and the data of a run."""

    config: TrainConfig
    model: DecoderConfig
    layout: Layout
    text: Text
    work: Work


def save_weights(run: Run, params: Any, frozen: Any, out_dir: Path, what: str):
    """Write the model in the layout of published weights, with its tokenizer; all processes call.

    Tuned weights have the dtype of their folder. An adapter has a folder of its own, too. `what`
    names the step.
    """
    config, model = run.config, run.model
    dtype = dtype_of(config, model)

    @functools.partial(jax.jit, out_shardings=run.layout.sharding())
    def whole(x):
        return x.astype(dtype) if frozen is None else x

    # One array after the other, because no device need hold them all.
    params, base = jax.tree.map(
        lambda x: np.asarray(whole(x).addressable_data(0)), (params, frozen)
    )
    if not is_writer():
        return
    if base is not None:
        folder = out_dir / "adapter"
        with replaced(folder) as new:
            lora.save(new, model, base, params, config.alpha, str(config.weights))
        say("adapter", f"of {what} is in {folder}")
        params = lora.merged(model, base, params, config.alpha, dtype)
    folder = out_dir / "weights"
    copied = tokenizer_files(config.weights if config.init_from else run.text.tokens)
    for line in write_weights(folder, model, params, copied):
        warn(line)
    say("weights", f"of {what} are in {folder}, in {dtype}, for generate.py")


def train(config: TrainConfig) -> Result:
    """Train a model; resume or report a run in `config.out_dir`.

    Args:
        config: The settings. A `dtype` of None is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        UserError: The settings do not fit together, or to the text, the machine or the folder; or
            the gradients are wrong; or the loss is no longer a number.
    """
    if config.dtype is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        config = dataclasses.replace(config, dtype=dtype)
    text = load_conversations(config) if config.conversations else load_text(config)
    # Products with a multiple of 64 are faster.
    model = model_config(config, vocab_size=-(-text.vocab_size // 64) * 64)
    check_tokens(config, text, model.vocab_size)
    layout, device = make_layout(config, model), jax.local_devices()[0]
    # Text and run folders may have other names on another machine.
    paths = dict.fromkeys(("data", "conversations", "out_dir", "init_from"))
    processes.check_same({**dataclasses.asdict(config), **paths, "text": text.sha256})
    init_state = make_steps(config, model, layout)[0]
    shapes = jax.eval_shape(model_functions(model, config.seed, layout)[0])
    tuned, tunes = jax.eval_shape(init_state).params, config.lora_rank is not None
    check_memory(config, tuned, layout.mesh.shape, device, shapes if tunes else None)
    kind, count = device.device_kind, layout.mesh.size
    work = work_of(model, config.context, shapes, config.batch_size, kind, count)
    run = Run(config, model, layout, text, work)
    describe(run, shapes)
    if tunes:
        names = ", ".join(lora.last_parts(tuned))
        say("adapter", f"{count_of(tuned):,} parameters of rank {config.lora_rank}: {names}")

    matrices = lora.last_parts(lora.matrices(model, shapes)) if tunes else ()
    with RunFolder(config, text.sha256, matrices) as folder:
        error = speed = None
        finished = folder.last_step == config.steps
        if config.gradient_check and not finished:
            error = check_gradients(run)
        frozen = first_params(config, model, layout) if tunes else None
        if folder.last_step:
            state = folder.restore(folder.last_step, init_state, layout.shardings)
        elif tunes:
            # Arrays of NumPy, because JAX's would lie on a device of this process alone.
            state = init_state(jax.device_get(new_adapter(config, model, frozen)))
        else:
            state = init_state(first_params(config, model, layout))
        if finished:
            say(
                "finished",
                f"{config.out_dir} holds this run with all its {config.steps} steps: nothing to "
                "train (another --out-dir begins anew)",
            )
        else:
            if folder.last_step:
                say("resuming", f"after step {folder.last_step}, from {config.out_dir}")
            with processes.stop_signals() as stopped:
                state, speed = run_steps(run, folder, state, frozen, stopped)
        folder.plot()
        step = int(state.step)
        best = folder.best_whole_step()
        if best != step:
            del state  # a device may not hold two
            state = folder.restore(best, init_state, layout.shardings)
        why = ", the lowest held-out loss," if best == folder.best_step() else ""
        save_weights(run, state.params, frozen, folder.path, f"step {best}{why}")
        lines = folder.metrics
        looks = [line["val_loss"] for line in lines if line["val_loss"] is not None]
        last = lines[-1] if lines and lines[-1]["step"] == step else None
        return Result(
            step=step,
            loss=last["loss"] if last else None,
            val_loss=looks[-1] if looks else None,
            bits_per_byte=text.bits_per_byte(looks[-1]) if looks else None,
            gradient_error=error,
            speed=speed,
            interrupted=step < config.steps,
        )
