"""Train a small GPT through `pallas_flash.attention`: one file, to read and to copy.

    pip install -e '.[train]'
    python scripts/train_gpt.py --preset gpt2-small      # 85 M parameters, for a GPU

Tokens are bytes, of the source of Python's standard library if there is no `--data`. First the
gradient of every parameter is compared with the gradient through dense attention. Results go to the
folder `--out-dir`: checkpoints, a loss curve, and weights for `scripts/generate.py`.

The same command resumes a run that was stopped or killed, to the same bits, because its only state
is (step, parameters, optimizer): a batch is a function of (seed, step). On a GPU that needs
`XLA_FLAGS=--xla_gpu_deterministic_ops=true`. `python -m models.train` does more: several devices,
published weights, tokenizers, and checkpoints that are verified.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import sys
import sysconfig
from typing import NoReturn

try:
    import absl.logging
    import jax
    import jax.numpy as jnp
    import matplotlib.figure
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from tqdm import tqdm

    import pallas_flash
    from models import Decoder
    from models.config import DecoderConfig, gpt
    from models.errors import UserError
    from models.generation import Generation, Sampling
    from models.training.files import lock
    from scripts.command import parse_path
except ModuleNotFoundError as error:
    sys.exit(f"error: no module named {error.name!r}: run pip install -e '.[train]' in a checkout.")

# The defaults of the flags.
CPU = dict(context=128, num_layers=4, num_heads=4, features=128)
CPU |= dict(steps=800, batch_size=16, learning_rate=3e-3, eval_every=200, seed=0)
GPT2_SMALL = CPU | dict(context=1024, num_layers=12, num_heads=12, features=768)
GPT2_SMALL |= dict(steps=2000, batch_size=32, learning_rate=6e-4)
PRESETS = {"cpu": CPU, "gpt2-small": GPT2_SMALL}


def fail(sentence: object) -> NoReturn:
    """End with a sentence that has flags where it has settings."""
    sys.exit(re.sub(r"`(\w+)`", lambda x: f"--{x[1].replace('_', '-')}", f"error: {sentence}"))


def read_text(flags) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes to train on and those held out, the last tenth."""
    root, out = flags.data or pathlib.Path(sysconfig.get_path("stdlib")), flags.out_dir.absolute()
    if root.is_file():
        text = root.read_bytes()
    else:
        skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
        pattern, skipped = ("**/*", set()) if flags.data else ("**/*.py", skipped)
        paths = [x for x in root.glob(pattern) if x.is_file() and out not in x.absolute().parents]
        paths = [x for x in (x.relative_to(root) for x in paths) if not skipped & {*x.parts}]
        # Mixed, so that held-out files are as the others.
        paths.sort(key=lambda x: hashlib.sha256(os.fsencode(x.as_posix())).digest())
        text = b"\n".join(x for x in ((root / y).read_bytes() for y in paths) if b"\0" not in x)
    sides = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if min(map(len, sides)) <= flags.context + 1:
        fail(
            f"`data` must be text, of more bytes on both sides than a context of {flags.context}; "
            f"got {len(sides[0])} to train on and {len(sides[1])} held out, of {str(root)!r}."
        )
    return np.frombuffer(sides[0], np.uint8), np.frombuffer(sides[1], np.uint8)


def cut_windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Return windows of the text, one token longer than the context: the last is only predicted."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def training_batch(text: np.ndarray, step: int, flags) -> np.ndarray:
    """Return the batch of a step: random windows, a function of (seed, step) alone."""
    random = np.random.default_rng([flags.seed, step])
    starts = random.integers(0, len(text) - flags.context, flags.batch_size)
    return cut_windows(text, starts, flags.context)


def model_config(flags) -> DecoderConfig:
    """Return the model: a small Llama with one matrix for reading and for predicting bytes."""
    names = "context", "num_layers", "num_heads", "num_kv_heads", "features"
    sizes = {name: getattr(flags, name) for name in names}
    chosen = None if flags.attention == "auto" else flags.attention
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"  # of activations
    try:
        config = gpt(**sizes, implementation=chosen, dtype=dtype)
        q, k = (
            jax.ShapeDtypeStruct((flags.batch_size, flags.context, n, config.head_dim), dtype)
            for n in (config.num_heads, config.num_kv_heads)
        )
        said = pallas_flash.explain(q, k, k, is_causal=True, implementation=chosen)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        fail(str(error).replace("`implementation`", "`attention`"))
    print(f"attention: {said.implementation}")
    return config


def make_loss(config: DecoderConfig):
    """Return the model as a function `loss(params, tokens)`, and its structure without arrays."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(params, tokens):
        """Mean cross-entropy of each token given those before, in nats."""
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, graph


def gradient_error(config: DecoderConfig, params, tokens) -> tuple[float, str]:
    """Return the largest `|ours - dense| / |dense|` of a parameter's gradient, and its name.

    Both are computed in float32 with exact products, whose rounding hides no mistake.
    """

    def gradient(implementation):
        exact = dataclasses.replace(config, dtype="float32", implementation=implementation)
        return jax.jit(jax.grad(make_loss(exact)[0]))(params, tokens)

    # Kernels for Hopper take no float32, so others are checked in their place.
    ours = None if config.implementation == "mosaic" else config.implementation
    with jax.default_matmul_precision("highest"):
        ours, dense = gradient(ours), gradient("reference")
    norm = jnp.linalg.norm
    errors = jax.tree.map(lambda a, b: norm(jnp.ravel(a - b)) / norm(jnp.ravel(b)), ours, dense)
    return max(
        # A gradient that is not a number must win.
        (np.inf if jnp.isnan(x) else float(x), jax.tree_util.keystr(path))
        for path, x in jax.tree_util.tree_leaves_with_path(errors)
    )


def make_optimizer(flags) -> optax.GradientTransformation:
    """Return AdamW with warmup, cosine decay and clipped gradients."""
    peak, warmup = flags.learning_rate, flags.steps // 16
    rate = optax.warmup_cosine_decay_schedule(0, peak, warmup, flags.steps, end_value=peak / 10)
    decayed = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    # From 1, because the rate at 0 is zero.
    adamw = optax.adamw(lambda n: rate(n + 1), b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_steps(loss, optimizer):
    """Return the compiled update of (step, params, optimizer state), and the held-out loss."""

    @functools.partial(jax.jit, donate_argnums=0)  # the new state takes the memory of the old one
    def update(state, tokens):
        step, params, memory = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, memory = optimizer.update(gradient, memory, params)
        return (step + 1, optax.apply_updates(params, updates), memory), value

    @jax.jit
    def held_out_loss(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(loss, params), batches))

    return update, held_out_loss


@contextlib.contextmanager
def open_folder(folder: pathlib.Path):
    """Give the checkpoints in a folder to one run at a time; a kill leaves none of them in part."""
    there = {x.name for x in folder.glob("*")} - {"train.lock"}
    if folder.is_file() or "run.json" in there or (there and "checkpoints" not in there):
        fail(f"`out_dir` must be new, or have a run of this script; got {str(folder)!r}.")
    absl.logging.set_verbosity(absl.logging.ERROR)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / "checkpoints"
    with lock(folder / "train.lock"), ocp.CheckpointManager(path, options=options) as opened:
        yield opened


def restore(checkpoints: ocp.CheckpointManager, step: int, state, settings: dict):
    """Return the state and the losses of a checkpoint of a run with these settings."""
    log = checkpoints.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore()))["log"]
    if changed := [name for name in settings if log["settings"].get(name) != settings[name]]:
        fail(
            f"`out_dir` must be new, or have a run of the same settings; got one that differs in "
            f"{', '.join(changed)}: go back to those, pass another --out-dir, or remove the folder."
        )
    wanted = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    return checkpoints.restore(step, args=wanted)["state"], log["losses"]


def draw_curve(path: pathlib.Path, losses: dict):
    """Draw the losses of all steps."""
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses["train"]) + 1), losses["train"], label="training batch")
    axes.plot(*zip(*losses["held out"], strict=True), marker="o", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


def train(flags):
    """Train, or go on with the run in the folder."""
    text, held_out = read_text(flags)
    config = model_config(flags)
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(flags.seed))))
    (loss, graph), optimizer = make_loss(config), make_optimizer(flags)
    state = jnp.int32(0), params, optimizer.init(params)
    losses = {"train": [], "held out": []}
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters", end=", ")
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out")
    settings = {name: x for name, x in vars(flags).items() if name not in ("data", "out_dir")}
    settings["text"] = hashlib.sha256(text.tobytes() + held_out.tobytes()).hexdigest()

    with open_folder(flags.out_dir) as checkpoints:
        if newest := checkpoints.latest_step():
            state, losses = restore(checkpoints, newest, state, settings)
            print(f"resuming after step {newest}")
        else:
            error, name = gradient_error(config, params, training_batch(text, 0, flags)[:2])
            print(f"gradients: error {error:.1e} relative to dense attention's (worst: {name})")
            if not error < 1e-4:
                fail(f"`attention` must be exact; got an error of {error:.1e}.")

        update, held_out_loss = make_steps(loss, optimizer)
        starts = np.linspace(0, len(held_out) - flags.context - 1, 20 * flags.batch_size)
        windows = cut_windows(held_out, starts.astype(int), flags.context)
        windows = windows.reshape(20, -1, flags.context + 1)
        values, bar = [], tqdm(range(int(state[0]) + 1, flags.steps + 1), disable=None)
        for step in bar:
            state, value = update(state, training_batch(text, step, flags))
            values.append(value)
            if step % flags.eval_every and step < flags.steps:
                continue
            losses["train"] += np.asarray(values).tolist()  # waits for the device
            losses["held out"].append([step, float(held_out_loss(state[1], windows))])
            now, values = (losses["train"][-1], losses["held out"][-1][1]), []
            bar.write("step {:5d}: loss {:.4f}, held out {:.4f} nats per byte".format(step, *now))
            if not np.isfinite(now).all():
                fail(f"`learning_rate` must be lower; got a loss of {now[0]}.")
            log = ocp.args.JsonSave({"settings": settings, "losses": losses})
            arrays = ocp.args.StandardSave(state)
            checkpoints.save(step, args=ocp.args.Composite(state=arrays, log=log))

        draw_curve(flags.out_dir / "loss.png", losses)
        model = nnx.merge(graph, state[1])
        shutil.rmtree(flags.out_dir / "weights", ignore_errors=True)
        model.save_pretrained(flags.out_dir / "weights")
        drawn = Generation(model, [list(b"def ")], 400, Sampling(0.8, 40), when_full="slide")
        print(f"\ndef {bytes(x for [x] in drawn if x is not None).decode(errors='replace')}\n")


def number(kind: type, least: float):
    """Return a parser of a flag's number."""

    def parse(text: str):
        if not least <= (x := kind(text)) < 2**31:
            raise argparse.ArgumentTypeError(f"must be from {least} to 2**31; got {text}")
        return x

    parse.__name__ = kind.__name__  # for argparse's "invalid int value"
    return parse


def main(argv: list[str] | None = None):
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="cpu", help="values of the flags that are not given")
    add("--data", type=parse_path, help="text, or a folder of it (default: Python's own source)")
    add("--out-dir", type=parse_path, default="runs/gpt", help="results; a run there is resumed")
    add("--attention", default="auto", help="the `implementation` of pallas_flash.attention")
    add("--num-kv-heads", type=number(int, 1), help="(default: --num-heads)")
    for name, x in CPU.items():
        kind = number(type(x), 0 if name == "seed" else 1 if type(x) is int else 1e-9)
        add(f"--{name.replace('_', '-')}", type=kind, help=f"(default: {x})")
    parser.set_defaults(**PRESETS[parser.parse_known_args(argv)[0].preset])
    try:
        train(parser.parse_args(argv))
    except (UserError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
