"""Train a small GPT, or tune published weights, end to end through `pallas_flash.attention`.

    pip install -e '.[train]'
    python scripts/train_gpt.py                          # a few minutes on two CPUs
    python scripts/train_gpt.py --data my_texts/ --steps 3000 --num-kv-heads 2
    python scripts/train_gpt.py --preset gpt2-small      # 85 M parameters, for a GPU
    python scripts/train_gpt.py --mesh data=2,fsdp=2,sequence=2,tensor=2    # several devices
    python scripts/train_gpt.py --attention cudnn        # to compare its speed, on a GPU
    python scripts/train_gpt.py --init-from Qwen2.5-0.5B --data tokens/    # fine-tuning

Without `--data` the text is the source of the Python that runs the script: several megabytes that
every machine has, in a language whose samples one can judge. Its tests, installed packages and
generated tables (`encodings`, `pydoc_data`) are left out. Tokens are bytes, unless `--data` is a
folder of `prepare_tokens.py`.

Before training, the script compares the gradient of every parameter through the chosen attention
with the gradient through the dense reference, and stops if they differ. (It does not compare
cuDNN's, which takes no float32.) Results go to the folder `--out-dir`; see `run_folder.py`.

The same command resumes a run that was stopped or killed, at its last undamaged checkpoint and to
the same bits: the only state is (step, parameters, optimizer), because batches and random keys are
functions of (seed, step). On a GPU, XLA chooses kernels by timing them and may add in any order, so
equal bits need `XLA_FLAGS=--xla_gpu_deterministic_ops=true` there, which is slower.

This file has, in reading order, functions of the model, the gradient check, the loop, and the run.
The other files are in `training/`: `settings.py` (flags and presets), `text.py` (data),
`weights.py` (fine-tuning), `attention.py`, `mesh.py` (several devices; `models/sharding.py` says
where parameters lie), `processes.py` (several processes, signals), `run_folder.py` and
`checkpoints.py` (files), and `report.py` (speed, metrics).
"""

import collections
import dataclasses
import functools
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tqdm import tqdm

    from models.generation import Generation, Sampling
    from models.gpt import GPT, GPTConfig, generate, loss
    from models.sharding import Layout
    from scripts.generation.tokens import Bytes, FromFolder
    from scripts.training import processes
    from scripts.training.attention import attention_layer
    from scripts.training.mesh import check_memory, make_layout
    from scripts.training.processes import UserError, fail, say
    from scripts.training.report import Speed, describe, metric_lines, program_bytes, work_of
    from scripts.training.run_folder import RunFolder, params_of, plot_comparison
    from scripts.training.settings import (
        TrainConfig,
        config_from_flags,
        flat_config,
        make_parser,
        message_with_flags,
    )
    from scripts.training.text import (
        Text,
        fit_to_text,
        held_out_batches,
        load_text,
        training_batch,
    )
    from scripts.training.weights import Tuned
except ModuleNotFoundError as error:
    raise SystemExit(
        "train_gpt.py: error: this script needs a checkout installed with its `train` extra; got "
        f"no module named {error.name!r}: run pip install -e '.[train]'."
    ) from None

# Largest relative error of a parameter's gradient, both sides in float32 with exact products. Only
# the order of sums differs, which gives about 1e-6.
GRADIENT_BOUND = 1e-4
# Longest context of the gradient check: the reference's memory is quadratic in it.
GRADIENT_CONTEXT = 1024
# Seconds after which a log gets a line.
LOG_SECONDS = 30


# ------------------------------------------------------------------------------- model and updates


class TrainState(NamedTuple):
    """The state of training."""

    step: jax.Array
    params: Any
    opt_state: Any


def model_functions(model: GPTConfig | Tuned, seed: int, layout: Layout | None = None):
    """Return the model as pure functions `init() -> params` and `loss_fn(params, batch) -> loss`.

    `init` should run uncompiled: op by op, each of its few shapes compiles once. XLA for GPUs takes
    minutes for all random numbers of a large model as one program.

    Flax modules are split once, here; the training loop has plain dictionaries of arrays.
    """
    if isinstance(model, Tuned):
        return model.functions(layout)

    def make():
        layer = attention_layer(model, layout)
        return GPT(model, rngs=nnx.Rngs(seed), attention_layer=layer, layout=layout)

    def init():
        return nnx.to_pure_dict(nnx.state(make()))

    graphdef = nnx.graphdef(nnx.eval_shape(make))

    def loss_fn(params, tokens):
        return loss(nnx.merge(graphdef, params), tokens.astype(jnp.int32))

    return init, loss_fn, graphdef


def make_optimizer(config: TrainConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return AdamW behind a global clip, and its schedule as a function of the updates done."""
    warmup_cosine = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_learning_rate,
    )

    def schedule(count):
        # The rate at zero is zero, and the first update would have no effect.
        return warmup_cosine(count + 1)

    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        # Decay of a norm's scale does not regularise.
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(clip_by_global_norm(config.clip_norm), adamw), schedule


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Return a transformation like `optax.clip_by_global_norm` that needs fewer kernels.

    Optax sums each array with two kernels. Here one kernel adds up all arrays of one shape, so that
    the layers share it.
    """

    def update(gradient, state, params=None):
        del params
        alike = collections.defaultdict(list)
        for x in jax.tree.leaves(gradient):
            alike[x.shape].append(jnp.square(x))
        norm = jnp.sqrt(sum(jnp.sum(sum(squares)) for squares in alike.values()))
        factor = jnp.minimum(1.0, largest / norm)
        return jax.tree.map(lambda x: x * factor, gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def mean_gradient(loss_fn, params, batch):
    """Return loss and gradient over a batch, `[parts, microbatch, ...]`, one part at a time."""

    def add_part(total, part):
        part = jax.value_and_grad(loss_fn)(params, part)
        return jax.tree.map(jnp.add, total, part), None

    # Parts have equal sizes, so the mean of their means is the mean over the batch.
    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    total, _ = jax.lax.scan(add_part, zeros, batch)
    parts = len(jax.tree.leaves(batch)[0])
    return jax.tree.map(lambda x: x / parts, total)


def compiler_options(layout: Layout) -> dict[str, bool | int] | None:
    """Return the options for XLA on GPUs.

    The first two keep matrix products in cuBLAS, as they are written. XLA would otherwise change
    the program for its own products before it compares them with cuBLAS's, and would keep the
    changes where cuBLAS wins: it cuts sums over tokens into parts that another kernel adds, and
    separates the halves of a gated MLP's backward, and additions to the residual stream from the
    product. It would also join q's product with k's, for which it concatenates both gradients.

    The others let devices of a mesh send while they compute. By default XLA allows one message at a
    time: the first message that is ready would overlap all products of the backward, even a small
    one, and the others would overlap no product.
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


def make_steps(config: TrainConfig, layout: Layout):
    """Return `init_state(params)`, `train_step(state, batch)` and `eval_step(params, batches)`.

    Without parameters, the state begins with random ones.
    """
    init, loss_fn, _ = model_functions(config.model, config.seed, layout)
    optimizer, schedule = make_optimizer(config)

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
    def train_step(state, batch):
        value, gradient = mean_gradient(loss_fn, state.params, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "lr": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state), metrics

    @functools.partial(jax.jit, out_shardings=layout.sharding())
    def eval_step(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(loss_fn, params), batches))

    return init_state, train_step, eval_step


# ---------------------------------------------------------------------------------- gradient check


def gradient_error(config: TrainConfig, text: Text, layout: Layout) -> tuple[float, str]:
    """Compare the gradient of the whole model with the one through the dense reference.

    Both are computed at the initial parameters on a few sequences, in float32 with full-precision
    products: the errors of TF32, a GPU's default, and of bfloat16, a run's default, would hide an
    error of the attention.

    Returns:
        The largest error of a parameter, `|ours - reference| / |reference|` in the L2 norm, and
        the name of that parameter.
    """
    sizes = layout.mesh.shape
    whole = sizes["sequence"]
    context = max(min(config.model.context, GRADIENT_CONTEXT) // whole, 1) * whole
    model = dataclasses.replace(
        config.model, context=context, dtype="float32", param_dtype="float32"
    )
    shares = sizes["data"] * sizes["fsdp"]
    check = dataclasses.replace(config, model=model, batch_size=max(2, shares), accumulation=1)
    batch = training_batch(text.train, 0, check, layout, text.train_ends)

    if isinstance(model, Tuned):
        params = model.read(config.init_from, layout)
    else:
        params = model_functions(model, config.seed, layout)[0]()

    # A search for the fastest matrix products of a GPU is not worth its time for one run.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None

    def gradient(attention):
        implementation = dataclasses.replace(model, attention=attention)
        _, loss_fn, _ = model_functions(implementation, config.seed, layout)
        compiled = jax.jit(
            lambda params, batch: jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[0], batch)),
            out_shardings=layout.shardings(params),
            compiler_options=quick,
        )
        return compiled(params, batch)

    with jax.default_matmul_precision("highest"):
        ours, reference = gradient(model.attention), gradient("reference")

    @functools.partial(jax.jit, out_shardings=layout.sharding())
    def relative(ours, reference):
        return jax.tree.map(
            lambda a, b: jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2)), ours, reference
        )

    errors = jax.tree.leaves_with_path(jax.device_get(relative(ours, reference)))
    return max(
        # A gradient that is not a number must win.
        (np.inf if np.isnan(error) else float(error), jax.tree_util.keystr(path))
        for path, error in errors
        # The gradient of a bias of keys is zero without rotary positions, and else a small sum of
        # large numbers.
        if not jax.tree_util.keystr(path, simple=True, separator="/").endswith("key/bias")
    )


def check_gradients(config: TrainConfig, text: Text, layout: Layout) -> float | None:
    """Print the end-to-end gradient error, and stop the script if it is too large."""
    if config.model.attention == "cudnn":
        say("gradients", "not compared: cuDNN takes no float32")
        return None
    say("gradients", "are compared with the dense reference's: compiling two programs")
    start = time.perf_counter()
    error, name = gradient_error(config, text, layout)
    say(
        "gradients",
        f"relative error {error:.1e} against the reference (worst parameter: {name}; bound "
        f"{GRADIENT_BOUND:.0e}; {time.perf_counter() - start:.1f} s)",
    )
    if not error <= GRADIENT_BOUND:
        raise UserError(
            f"`attention` must give the reference's gradients to within {GRADIENT_BOUND:.0e}; got "
            f"a relative error of {error:.1e} at {name}: its gradients are wrong here, so try "
            "another --attention, and please report it."
        )
    return error


# ---------------------------------------------------------------------------------------- the loop


def run_steps(config, layout, work, text, folder, state, train_step, eval_step, stopped):
    """Update the state until the last step, or until `stopped` has an entry.

    Returns:
        The state, and the mean speed.
    """
    first, start = int(state.step), time.perf_counter()
    batch = training_batch(text.train, first + 1, config, layout, text.train_ends)
    held_out = held_out_batches(text.held_out, config, layout, text.held_out_ends)
    say("compiling", "an update and an evaluation")
    # Compiled here, so that no step's time includes compilation.
    train_step = train_step.lower(state, batch).compile()
    eval_step = eval_step.lower(state.params, held_out).compile()
    needed = program_bytes(train_step) / 1e9
    say(
        "compiled", f"in {time.perf_counter() - start:.1f} s; a step takes {needed:.2f} GB a device"
    )

    # Only a terminal shows the bar (disable=None). A log gets lines after LOG_SECONDS, too.
    progress = tqdm(
        total=config.steps,
        initial=first,
        unit="step",
        disable=None if processes.is_writer() else True,
    )
    vote = processes.Vote(layout, stopped)
    pending, seconds = [], 0.0
    start = printed = time.perf_counter()
    with progress:
        for step in range(first + 1, config.steps + 1):
            batch = training_batch(text.train, step, config, layout, text.train_ends)
            state, metrics = train_step(state, batch)
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
            speed = work.speed(1e3 * elapsed / len(pending))
            val_loss = float(eval_step(state.params, held_out)) if look else None
            bits = None if val_loss is None else text.bits_per_byte(val_loss)
            lines = metric_lines(step, values, speed, val_loss, bits)
            if processes.is_writer() and (look or (due and progress.disable)):
                more = f"{progress.format_interval((config.steps - step) * speed.ms / 1e3)} left"
                if look:
                    more = f"held out {val_loss:.4f} ({bits:.3f} bits per byte)"
                progress.write(f"step {step:6d}   loss {lines[-1]['loss']:.4f}   {more}   {speed}")
            if look or due:
                printed = time.perf_counter()
            progress.set_postfix_str(
                f"loss {lines[-1]['loss']:.3f}, {speed.tokens_per_second:,.0f} tokens/s"
            )
            # The lines come first, so that a checkpoint has all the steps before it.
            folder.append(lines)
            if save:
                folder.save(step, state)
            if stop:
                break
            pending, start = [], time.perf_counter()
    return state, work.speed(1e3 * seconds / (int(state.step) - first))


# ----------------------------------------------------------------------------------------- the run


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        step: Updates done, over all the sessions of the run.
        loss: Training loss of the last update, in nats per token.
        val_loss: Last loss on the held-out text; None without an evaluation.
        bits_per_byte: The same in bits for a byte of that text.
        gradient_error: Error of the gradient check; None without a check.
        speed: Mean speed of this session, without compilation, evaluation and checkpoints; None
            without an update.
        sample: The text sample; None if the run was interrupted.
        interrupted: Whether Ctrl-C (or SIGTERM) ended the session before the run's last step.
    """

    step: int
    loss: float | None
    val_loss: float | None
    bits_per_byte: float | None
    gradient_error: float | None
    speed: Speed | None
    sample: str | None
    interrupted: bool


def initial_params(config: TrainConfig, layout: Layout, shapes) -> Callable[[], Any]:
    """Return a function that reads what the run begins with: parameters, or None for random ones.

    Raises:
        UserError: The folder in `init_from` is neither a run of this model nor weights.
    """
    if config.init_from is None:
        return lambda: None
    if isinstance(config.model, Tuned):
        return functools.partial(config.model.read, config.init_from, layout)
    return params_of(Path(config.init_from), config.model, shapes, layout.shardings(shapes))


def sample_text(config: TrainConfig, layout: Layout, params, words: Bytes | FromFolder) -> str:
    """Return a continuation of the prompt by the model."""
    prompt = words.encode(config.prompt)
    if isinstance(config.model, Tuned):
        _, _, graphdef = model_functions(config.model, config.seed, layout)
        drawn = Sampling(config.temperature, config.top_k, seed=config.seed)
        model, count = nnx.merge(graphdef, params), config.sample_tokens
        options = {"stop_tokens": words.stop_tokens, "when_full": "slide"}
        generated = Generation(model, [prompt], count, drawn, **options)
        return words.decode([*prompt, *(token for [token] in generated)])
    # Devices do not divide one sequence; the layers run where their parameters lie.
    _, _, graphdef = model_functions(config.model, config.seed)

    @functools.partial(jax.jit, out_shardings=layout.sharding())
    def sample(params):
        key = jax.random.fold_in(jax.random.key(config.seed), config.steps)
        return generate(
            nnx.merge(graphdef, params),
            key,
            np.array([prompt], np.int32),
            config.sample_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
        )

    return words.decode(np.asarray(sample(params)[0]).tolist())


def train(config: TrainConfig, *, restart: bool = False) -> TrainResult:
    """Train a model; resume or report a run in `config.out_dir`.

    Args:
        config: The settings. A model `dtype` of None is bfloat16 on a GPU and float32 elsewhere.
        restart: Whether to replace a run in `config.out_dir`, and not to resume it.

    Raises:
        UserError: The settings do not fit together, or to the text, the machine or the folder; or
            the gradients are wrong; or the loss is no longer a number.
    """
    if config.model.dtype is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    layout, device = make_layout(config), jax.local_devices()[0]
    text = load_text(config)
    config = fit_to_text(config, text)
    # Text and run folders may have other names on another machine.
    paths = {"data": None, "out_dir": None, "init_from": None}
    processes.check_same({**flat_config(config), **paths, "text": text.sha256})
    init_state, train_step, eval_step = make_steps(config, layout)
    params = jax.eval_shape(init_state).params
    check_memory(config, params, layout.mesh.shape, device)
    work = work_of(config.model, params, config.batch_size, device, layout.mesh.size)
    describe(config, layout, work, text, params)

    tokens = None if text.prepared is None else Path(config.data)
    with RunFolder(config, text.sha256, restart=restart, tokens=tokens) as folder:
        error = speed = None
        finished = folder.last_step == config.steps
        # Before the gradient check, which compiles twice: another run's folder may be wrong.
        read = (lambda: None) if folder.last_step else initial_params(config, layout, params)
        if config.gradient_check and not finished:
            error = check_gradients(config, text, layout)
        state = folder.resume(lambda: init_state(read()), layout.shardings)
        if finished:
            say(
                "finished",
                f"{config.out_dir} holds this run with all its {config.steps} steps: nothing to "
                "train (--restart replaces it, another --out-dir keeps it)",
            )
        else:
            if folder.last_step:
                say("resuming", f"after step {folder.last_step}, from {config.out_dir}")
            with processes.stop_signals() as stopped:
                state, speed = run_steps(
                    config, layout, work, text, folder, state, train_step, eval_step, stopped
                )

        folder.plot()
        lines = folder.metrics()
        interrupted = int(state.step) < config.steps
        looks = [line["val_loss"] for line in lines if line["val_loss"] is not None]
        if isinstance(config.model, Tuned) and not interrupted:
            config.model.save(config.init_from, state.params, folder.path, layout)
        return TrainResult(
            step=int(state.step),
            loss=lines[-1]["loss"],
            val_loss=looks[-1] if looks else None,
            bits_per_byte=text.bits_per_byte(looks[-1]) if looks else None,
            gradient_error=error,
            speed=speed,
            sample=None if interrupted else sample_text(config, layout, state.params, text.tokens),
            interrupted=interrupted,
        )


def train_all(config: TrainConfig, other: str | None, *, restart: bool) -> TrainResult:
    """Train, and before that a run by another attention from the same seed; draw both losses.

    Args:
        config: The settings.
        other: The attention of the other run, in a folder beside; None for no other run.
        restart: See `train`.

    Returns:
        The result of the run of these settings, or of an interrupted other run.
    """
    if other is None:
        return train(config, restart=restart)
    attention = None if other == "auto" else other
    if attention == config.model.attention:
        raise UserError(f"`compare_attention` must be another than `attention`; got {other!r}.")
    model = dataclasses.replace(config.model, attention=attention)
    folder = f"{config.out_dir}-{other}"
    second = dataclasses.replace(config, model=model, out_dir=folder, gradient_check=False)
    # First, because it may be refused.
    result = train(second, restart=restart)
    if not result.interrupted:
        result = train(config, restart=restart)
    if not result.interrupted:
        plot_comparison({config.model.attention or "auto": config.out_dir, other: folder})
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    start = time.perf_counter()
    parser = make_parser((__doc__ or "").partition("\n")[0])
    processes.add_process_flags(parser)
    flags = vars(parser.parse_args(argv))
    restart = flags.pop("restart")
    other = flags.pop("compare_attention", None)
    which = {name: flags.pop(name) for name in processes.FLAGS if name in flags}
    # The same command without --restart resumes the run.
    command = shlex.join(["python", sys.argv[0], *(a for a in argv if a != "--restart")])
    try:
        config = config_from_flags(flags)
        processes.join(which)
        result = train_all(config, other, restart=restart)
    except UserError as error:
        fail(message_with_flags(error))
        return 2
    except OSError as error:
        fail(f"reading or writing failed: {error}: repair this, then run the same command again.")
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(
            f"--batch-size must fit the device's memory; got {config.microbatch} sequences of "
            f"{config.model.context} tokens at once, for which it could not allocate the memory of "
            "a program: raise --accumulation, or choose a smaller model."
        )
        return 2
    except KeyboardInterrupt:
        say("stopped", f"at once, without a new checkpoint; continue with: {command}")
        return 130

    if result.interrupted:
        say("stopped", f"after step {result.step}, checkpoint saved; resume with: {command}")
        processes.finish()
        return 130
    if processes.is_writer():
        print(f"\n{result.sample.strip()}\n")
    speed = "" if result.speed is None else f", {result.speed}"
    say(
        "done",
        f"step {result.step}: loss {result.loss:.4f}, held out {result.val_loss:.4f} nats per "
        f"token, {result.bits_per_byte:.3f} bits per byte{speed}; "
        f"{time.perf_counter() - start:.0f} s in all; see {config.out_dir}",
    )
    processes.finish()
    return 0


if __name__ == "__main__":
    # The terminal may lack characters of the sample.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
    except Exception:  # Python would print the error, and then wait for the other processes.
        traceback.print_exc()
        status = 1
    sys.exit(processes.leave(status))
