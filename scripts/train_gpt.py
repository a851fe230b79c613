"""Trains a small GPT on bytes, end to end through `pallas_flash.attention`.

    pip install -e '.[train]'
    python scripts/train_gpt.py                          # a few minutes on two CPU cores
    python scripts/train_gpt.py --data my_texts/ --steps 3000 --num-kv-heads 2
    python scripts/train_gpt.py --preset gpt2-small      # 85 M parameters, for a GPU

Its speed, beside that of the same model through cuDNN's attention:

    python scripts/train_gpt.py --preset gpt2-small --steps 50 --out-dir runs/1
    python scripts/train_gpt.py --preset gpt2-small --steps 50 --out-dir runs/2 --attention cudnn

Without `--data` the text is the source of the Python that runs the script: several megabytes that
every machine has, in a language whose samples one can judge. Its tests, installed packages and
generated tables (`encodings`, `pydoc_data`) are left out.

Before training, the gradient of every parameter through the chosen attention is compared with the
gradient through the dense reference; the script stops if they differ. (cuDNN is there for
comparison and not compared, because it takes no float32.)

`--out-dir` receives:

    metrics.jsonl    one object a step: step, loss, val_loss, lr, ms, tokens_per_second, mfu
    loss.png         the curves of that file
    checkpoints/     the last few states, one folder per step
    run.json         the configuration, and a hash of the text
    train_gpt.lock   held while a process trains there

The same command resumes a run that was stopped or killed, at the last checkpoint whose bytes are
still those that were written, and to the same bits: the only state is (step, parameters,
optimizer), because batches and random keys are functions of (seed, step). On a GPU, XLA chooses
kernels by timing them and may add in any order, so equal bits there need
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`, which is slower.

This file is the training itself, in reading order: functions of the model, the gradient check, the
loop, the run. Around it, in `training/`: `settings.py` (flags and presets), `text.py` (data),
`attention.py`, `run_folder.py` (files and checkpoints), `memory.py` (what can fit), `process.py`
(signals, pipes) and `speed.py` (tokens/s, MFU).
"""

import dataclasses
import functools
import os
import platform
import shlex
import signal
import sys
import time
from typing import Any, NamedTuple

if __name__ == "__main__":
    # From here on SIGTERM is a Ctrl-C, and what is printed then says what became of the run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

try:
    import flax
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tqdm import tqdm

    import pallas_flash
    from models.gpt import GPT, GPTConfig, generate, loss
    from scripts.training.attention import attention_layer, explain_attention
    from scripts.training.memory import check_memory, out_of_memory
    from scripts.training.messages import UserError, say
    from scripts.training.process import as_a_process, stop_signals
    from scripts.training.run_folder import RunFolder
    from scripts.training.settings import TrainConfig, config_from_flags, make_parser
    from scripts.training.speed import Speed, Work, work_of
    from scripts.training.text import Text, held_out_batches, load_text, training_batch
except ModuleNotFoundError as error:
    raise SystemExit(
        "train_gpt.py: error: this script needs a checkout installed with its `train` extra; got "
        f"no module named {error.name!r}: run pip install -e '.[train]'."
    ) from None
except KeyboardInterrupt:
    print("stopped    before anything ran")
    raise SystemExit(130) from None

# Largest relative error of a parameter's gradient, both sides in float32 with exact products. The
# two differ by the order of their sums alone, which gives about 1e-6.
GRADIENT_BOUND = 1e-4
# Longest text of the gradient check, because the reference needs memory quadratic in it.
GRADIENT_CONTEXT = 1024


# ------------------------------------------------------------------------------- model and updates


class TrainState(NamedTuple):
    """All that changes during training."""

    step: jax.Array
    params: Any
    opt_state: Any


def model_functions(model: GPTConfig, seed: int):
    """The model as pure functions: `init() -> params` and `loss_fn(params, tokens) -> loss`.

    `init` is best left uncompiled: op by op, its few shapes compile once each, where XLA for GPUs
    takes minutes over all the random numbers of a large model as one program.

    Flax modules are split once, here; the training loop then carries plain dictionaries of arrays.
    """

    def make():
        return GPT(model, rngs=nnx.Rngs(seed), attention_layer=attention_layer(model))

    def init():
        return nnx.to_pure_dict(nnx.state(make()))

    graphdef = nnx.graphdef(nnx.eval_shape(make))

    def loss_fn(params, tokens):
        return loss(nnx.merge(graphdef, params), tokens.astype(jnp.int32))

    return init, loss_fn, graphdef


def make_optimizer(config: TrainConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW behind a global clip, and its schedule as a function of the updates done before."""
    warmup_cosine = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_learning_rate,
    )

    def schedule(count):
        # One ahead, for the rate at zero is zero, and the first update would do nothing.
        return warmup_cosine(count + 1)

    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        # Pulling a norm's scale towards zero regularises nothing.
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), schedule


def mean_gradient(loss_fn, params, batch):
    """Loss and gradient over `batch[parts, microbatch, context + 1]`, one part after the other."""

    def add_part(total, tokens):
        part = jax.value_and_grad(loss_fn)(params, tokens)
        return jax.tree.map(jnp.add, total, part), None

    # Parts have equal sizes, so the mean of their means is the mean over the batch.
    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    total, _ = jax.lax.scan(add_part, zeros, batch)
    return jax.tree.map(lambda x: x / len(batch), total)


def make_steps(config: TrainConfig):
    """Builds `init_state()`, `train_step(state, batch)` and `eval_step(params, batches)`."""
    init, loss_fn, _ = model_functions(config.model, config.seed)
    optimizer, schedule = make_optimizer(config)

    def init_state():
        params = init()
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    # Donation lets the new state take the place of the old one in memory.
    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        value, gradient = mean_gradient(loss_fn, state.params, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "lr": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state), metrics

    @jax.jit
    def eval_step(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(loss_fn, params), batches))

    return init_state, train_step, eval_step


# ---------------------------------------------------------------------------------- gradient check


def gradient_error(config: TrainConfig, text: Text) -> tuple[float, str]:
    """Compares the gradient of the whole model with the one through the dense reference.

    Both are taken at the initial parameters on two texts, in float32 with full-precision products:
    the defaults of a GPU (TF32) and of a run (bfloat16) would hide an error of the attention
    behind their own.

    Returns:
        The largest error of a parameter, `|ours - reference| / |reference|` in the L2 norm, and
        the name of that parameter.
    """
    context = min(config.model.context, GRADIENT_CONTEXT)
    model = dataclasses.replace(
        config.model, context=context, dtype="float32", param_dtype="float32"
    )
    check = dataclasses.replace(config, model=model, batch_size=2, accumulation=1)
    [tokens] = training_batch(text.train, 0, check)

    init, _, _ = model_functions(model, config.seed)
    params = init()

    # A search for the fastest matrix products of a GPU is not worth its time for one run.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None

    def gradient(attention):
        implementation = dataclasses.replace(model, attention=attention)
        _, loss_fn, _ = model_functions(implementation, config.seed)
        compiled = jax.jit(jax.grad(loss_fn), compiler_options=quick)
        return jax.device_get(compiled(params, tokens))

    with jax.default_matmul_precision("highest"):
        ours, reference = gradient(model.attention), gradient("reference")

    def relative(path, a, b):
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        # A gradient that is not a number must win the comparison below.
        return (np.inf if np.isnan(error) else error), jax.tree_util.keystr(path)

    pairs = jax.tree_util.tree_map_with_path(relative, ours, reference)
    return max(jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple)))


def check_gradients(config: TrainConfig, text: Text) -> float | None:
    """Prints the end-to-end gradient error, and stops the script if it is too large."""
    if config.model.attention == "cudnn":
        say("gradients", "not compared: cuDNN takes no float32")
        return None
    start = time.perf_counter()
    error, name = gradient_error(config, text)
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


def run_steps(config, work, text, folder, state, train_step, eval_step, stopped):
    """Updates the state until the last step, or until `stopped` is no longer empty.

    Returns:
        The state, and the mean speed.
    """
    first, start = int(state.step), time.perf_counter()
    batch = training_batch(text.train, first + 1, config)
    held_out = jax.device_put(held_out_batches(text.held_out, config))
    # Compiled ahead, so that no step's time has compilation in it.
    train_step = train_step.lower(state, batch).compile()
    eval_step = eval_step.lower(state.params, held_out).compile()
    say("compiled", f"in {time.perf_counter() - start:.1f} s")

    # The bar is for a terminal (disable=None); the lines of the evaluations are for a log, too.
    progress = tqdm(total=config.steps, initial=first, unit="step", disable=None)
    pending, seconds = [], 0.0
    start = time.perf_counter()
    with progress:
        for step in range(first + 1, config.steps + 1):
            state, metrics = train_step(state, training_batch(text.train, step, config))
            pending.append(metrics)
            progress.update()
            stop = bool(stopped)
            look = step % config.eval_every == 0 or step == config.steps
            save = step % config.checkpoint_every == 0 or step == config.steps or stop
            if not (look or save or step % config.log_every == 0):
                continue

            # Reading the values waits for the device; until here, steps were only sent to it.
            values = jax.device_get(pending)
            elapsed = time.perf_counter() - start
            seconds += elapsed
            speed = work.speed(1e3 * elapsed / len(pending))
            val_loss = float(eval_step(state.params, held_out)) if look else None
            lines = metric_lines(step, values, speed, val_loss)
            if look:
                progress.write(
                    f"step {step:6d}   loss {lines[-1]['loss']:.4f}   held out {val_loss:.4f}   "
                    f"{speed}"
                )
            progress.set_postfix(loss=f"{lines[-1]['loss']:.3f}")
            # The lines come first, so that a checkpoint always finds all the steps before it.
            folder.append(lines)
            if save:
                folder.save(step, state)
            if stop:
                break
            pending, start = [], time.perf_counter()
    return state, work.speed(1e3 * seconds / (int(state.step) - first))


def metric_lines(last_step, values, speed, val_loss) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for consecutive steps; `val_loss` belongs to the last one."""
    first = last_step - len(values) + 1
    lines = [
        {
            "step": step,
            "loss": float(value["loss"]),
            "val_loss": val_loss if step == last_step else None,
            "lr": float(value["lr"]),
            **speed._asdict(),
        }
        for step, value in enumerate(values, first)
    ]
    for line in lines:
        if not np.isfinite([line["loss"], line["val_loss"] or 0.0]).all():
            raise UserError(
                f"`loss` must stay finite; got {line['loss']} at step {line['step']}: try a lower "
                "--learning-rate or a longer --warmup-steps."
            )
    return lines


# ----------------------------------------------------------------------------------------- the run


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        step: Updates done, over all the sessions of the run.
        loss: Training loss of the last update, in nats per byte.
        val_loss: Last loss on the held-out text; None if it was not looked at.
        gradient_error: Error of the gradient check; None if there was none.
        speed: Mean speed of this session, without compilation, evaluation and checkpoints; None
            if it made no update.
        sample: The text sample; None if the run was interrupted.
        interrupted: Whether Ctrl-C (or SIGTERM) ended the session before the run's last step.
    """

    step: int
    loss: float | None
    val_loss: float | None
    gradient_error: float | None
    speed: Speed | None
    sample: str | None
    interrupted: bool


def describe(config: TrainConfig, work: Work, text: Text, params):
    """Prints what runs, on what, and through which attention."""
    model, device = config.model, jax.devices()[0]
    attention, reasons = explain_attention(model, config.microbatch)
    count = sum(x.size for x in jax.tree.leaves(params))
    unused = f", {jax.device_count() - 1} more not used" if jax.device_count() > 1 else ""
    say("device", f"{device.platform} ({device.device_kind}{unused}), {os.cpu_count()} CPU cores")
    say(
        "versions",
        f"python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}, "
        f"pallas_flash {pallas_flash.__version__}",
    )
    say(
        "model",
        f"{count:,} parameters: {model.num_layers} layers of {model.embed_dim}, {model.num_heads} "
        f"query and {model.kv_heads} key/value heads, context {model.context}, {model.dtype} "
        f"activations, {model.param_dtype} parameters",
    )
    say("attention", f"{attention} (asked for: {model.attention or 'auto'})")
    for line in reasons.splitlines():
        say("", line)
    say(
        "text",
        f"{len(text.train):,} bytes of {len(text.train_files)} files to train on, "
        f"{len(text.held_out):,} bytes of {len(text.held_out_files)} files held out",
    )
    if text.left_out:
        say("", f"left out, because they are folders of runs: {', '.join(text.left_out)}")
    say("updates", f"{config.steps:,}, {config.warmup_steps} of them warmup")
    say("work", str(work))


def sample_text(config: TrainConfig, params) -> str:
    """Continues the prompt by a text of the model's own."""
    _, _, graphdef = model_functions(config.model, config.seed)
    key = jax.random.fold_in(jax.random.key(config.seed), config.steps)
    prompt = jnp.frombuffer(config.prompt.encode(), jnp.uint8)[None].astype(jnp.int32)
    tokens = generate(
        nnx.merge(graphdef, params),
        key,
        prompt,
        config.sample_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
    )
    return bytes(np.asarray(tokens[0], np.uint8)).decode(errors="replace")


def train(config: TrainConfig, *, restart: bool = False) -> TrainResult:
    """Trains a model; resumes or reports a run found in `config.out_dir`.

    Args:
        config: The settings. A model `dtype` of None is bfloat16 on a GPU and float32 elsewhere.
        restart: Replaces a run found in `config.out_dir` instead of resuming it.

    Raises:
        UserError: The settings do not fit each other, the text, the machine or the folder; or the
            gradients are wrong; or the loss is no longer a number.
    """
    if config.model.vocab_size != 256:
        raise UserError(
            f"`vocab_size` must be 256, because tokens are bytes; got {config.model.vocab_size}."
        )
    if config.model.dtype is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    check_memory(config, jax.devices()[0])
    text = load_text(config)
    init_state, train_step, eval_step = make_steps(config)
    params = jax.eval_shape(init_state).params
    work = work_of(config.model, params, config.batch_size, jax.devices()[0])
    describe(config, work, text, params)

    with RunFolder(config, text.sha256, restart=restart) as folder:
        error = speed = None
        finished = folder.last_step == config.steps
        if config.gradient_check and not finished:
            error = check_gradients(config, text)
        state = folder.resume(init_state)
        if finished:
            say(
                "finished",
                f"{config.out_dir} holds this run with all its {config.steps} steps: nothing to "
                "train (--restart replaces it, another --out-dir keeps it)",
            )
        else:
            if folder.last_step:
                say("resuming", f"after step {folder.last_step}, from {config.out_dir}")
            with stop_signals() as stopped:
                state, speed = run_steps(
                    config, work, text, folder, state, train_step, eval_step, stopped
                )

        folder.plot()
        lines = folder.metrics()
        interrupted = int(state.step) < config.steps
        looks = [line["val_loss"] for line in lines if line["val_loss"] is not None]
        return TrainResult(
            step=int(state.step),
            loss=lines[-1]["loss"],
            val_loss=looks[-1] if looks else None,
            gradient_error=error,
            speed=speed,
            sample=None if interrupted else sample_text(config, state.params),
            interrupted=interrupted,
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    start = time.perf_counter()
    flags = vars(make_parser((__doc__ or "").partition("\n")[0]).parse_args(argv))
    restart = flags.pop("restart")
    # To resume is to run the same again, but for what would delete the run.
    command = shlex.join(["python", sys.argv[0], *(a for a in argv if a != "--restart")])
    try:
        config = config_from_flags(flags)
        result = train(config, restart=restart)
    except UserError as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"train_gpt.py: error: {out_of_memory(config)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        say("stopped", f"at once, without a new checkpoint; continue with: {command}")
        return 130

    if result.interrupted:
        say("stopped", f"after step {result.step}, checkpoint saved; resume with: {command}")
        return 130
    print(f"\n{result.sample.strip()}\n")
    speed = "" if result.speed is None else f", {result.speed}"
    say(
        "done",
        f"step {result.step}: loss {result.loss:.4f}, held out {result.val_loss:.4f} nats per "
        f"byte{speed}; {time.perf_counter() - start:.0f} s in all; see {config.out_dir}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(as_a_process(main))
