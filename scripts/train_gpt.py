"""Trains a small GPT on bytes, end to end through `pallas_flash.attention`.

    pip install -e '.[train]'
    python scripts/train_gpt.py                          # a few minutes on two CPU cores
    python scripts/train_gpt.py --preset gpt2-small      # 85 M parameters, for a GPU
    python scripts/train_gpt.py --data my_texts/ --steps 3000 --num-kv-heads 2

Without `--data` the text is the source of the Python that runs the script: several megabytes that
every machine has, in a language whose samples one can judge. Its tests, installed packages and
generated tables (`encodings`, `pydoc_data`) are left out. Tokens are bytes. About a tenth of the
text is held out by whole files, chosen by a hash of their names, so that no file is on both sides.

Before training, the gradient of every parameter through the chosen attention is compared with the
gradient through the dense reference; the script stops if they differ.

`--out-dir` receives:

    metrics.jsonl    one object a step: step, loss, val_loss, lr, ms, tokens_per_second
    loss.png         the curves of that file
    checkpoints/     the last few states, one folder per step
    run.json         the configuration, and a hash of the text

The same command resumes a run that was stopped or killed, at the last checkpoint and to the same
bits: the only state is (step, parameters, optimizer), because batches and random keys are functions
of (seed, step). On a GPU, XLA chooses kernels by timing them and may add in any order, so equal
bits there need `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, which is slower.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import typing
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pallas_flash

try:
    import orbax.checkpoint as ocp
    from matplotlib.figure import Figure
    from tqdm import tqdm

    from models.gpt import GPT, GPTConfig, generate, loss
except ModuleNotFoundError as error:
    raise SystemExit(
        "train_gpt.py: error: this script needs a checkout installed with its `train` extra; got "
        f"no module named {error.name!r}: run pip install -e '.[train]'."
    ) from None

# Share of the text that is never trained on.
HELD_OUT = 0.1
# Largest relative error of a parameter's gradient, both sides in float32 with exact products. The
# two differ by the order of their sums alone, which gives about 1e-6.
GRADIENT_BOUND = 1e-4
# Longest text of the gradient check, because the reference needs memory quadratic in it.
GRADIENT_CONTEXT = 1024
# What lies between two files: a byte that text does not have.
FILE_SEPARATOR = b"\0"
# Folders of the standard library that are installed packages, tests, or generated tables.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
NOT_SOURCE |= {"encodings", "pydoc_data"}
# The files of a run.
METRICS, CURVES, CHECKPOINTS, RUN = "metrics.jsonl", "loss.png", "checkpoints", "run.json"


class UserError(ValueError):
    """A mistake in what was asked for: told in one sentence, without a traceback."""


def say(label: str, text: str):
    """Prints a labelled line, at once even into a file."""
    print(f"{label:<11}{text}", flush=True)


# ---------------------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run; the defaults are the `cpu` preset.

    Fields that are not compared may change when a run resumes, because no number in metrics.jsonl
    depends on them. (The text is compared by its bytes, not by its path.)

    Attributes:
        model: The shape of the model; its fields are flags of their own.
        data: Text file, or folder of text files, to train on; auto is Python's standard library.
        out_dir: Folder of the run's results; a run found there is resumed.
        seed: Decides the initial parameters, the order of the data and the sample.
        steps: Number of optimizer updates.
        batch_size: Sequences per update.
        accumulation: Number of equal parts the batch is computed in, one after the other, to save
            memory; the update is that of the whole batch.
        learning_rate: Peak learning rate of AdamW, reached after warmup_steps.
        final_learning_rate: Share of the peak at which the cosine decay ends.
        warmup_steps: Updates of linear warmup.
        weight_decay: AdamW's decay, of matrices only.
        beta1: AdamW's decay rate of the gradient's mean.
        beta2: AdamW's decay rate of the gradient's square.
        clip_norm: Largest global norm of the gradient.
        eval_every: Updates between two looks at the held-out text.
        eval_batches: Size of such a look, in batches spread evenly over the held-out text.
        log_every: Updates between two writes to metrics.jsonl (each update has its line).
        checkpoint_every: Updates between two checkpoints.
        keep_checkpoints: Number of checkpoints kept.
        gradient_check: Whether to compare gradients with the reference before training.
        sample_tokens: Length of the sample that ends the run, in bytes.
        prompt: What the sample continues.
        temperature: Temperature of the sample; 0 takes the most likely byte.
        top_k: Most likely bytes that the sample is drawn from; auto is all of them.
    """

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: str | None = dataclasses.field(default=None, compare=False)
    out_dir: str = dataclasses.field(default="runs/gpt", compare=False)
    seed: int = 0
    steps: int = 800
    batch_size: int = 16
    accumulation: int = 1
    learning_rate: float = 3e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    eval_every: int = 200
    eval_batches: int = 20
    log_every: int = dataclasses.field(default=10, compare=False)
    checkpoint_every: int = dataclasses.field(default=200, compare=False)
    keep_checkpoints: int = dataclasses.field(default=3, compare=False)
    gradient_check: bool = dataclasses.field(default=True, compare=False)
    sample_tokens: int = dataclasses.field(default=400, compare=False)
    prompt: str = dataclasses.field(default="\n", compare=False)
    temperature: float = dataclasses.field(default=0.8, compare=False)
    top_k: int | None = dataclasses.field(default=40, compare=False)

    def __post_init__(self):
        positive = (
            "steps batch_size accumulation learning_rate clip_norm eval_every eval_batches "
            "log_every checkpoint_every keep_checkpoints sample_tokens"
        )
        # Written such that NaN is refused, too.
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` must be positive; got {getattr(self, name)}.")
        for name in ("seed", "warmup_steps", "weight_decay", "temperature"):
            if not getattr(self, name) >= 0:
                raise UserError(f"`{name}` must not be negative; got {getattr(self, name)}.")
        for name in ("beta1", "beta2", "final_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"`{name}` must be between 0 and 1; got {getattr(self, name)}.")
        if self.batch_size % self.accumulation:
            raise UserError(
                f"`batch_size` must be a multiple of `accumulation`; got {self.batch_size} and "
                f"{self.accumulation}."
            )
        if self.warmup_steps >= self.steps:
            raise UserError(
                f"`warmup_steps` must be below `steps`; got {self.warmup_steps} and {self.steps}."
            )
        if self.model.context < 2:
            raise UserError(
                "`context` must be at least 2, or attention has nothing to choose from; got "
                f"{self.model.context}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"`top_k` must be at least 1, or auto for all bytes; got {self.top_k}.")
        if not self.prompt:
            raise UserError("`prompt` must have at least one byte; got ''.")

    @property
    def microbatch(self) -> int:
        """Sequences computed at once."""
        return self.batch_size // self.accumulation


PRESETS = {
    "cpu": TrainConfig(),
    # GPT-2's size but for its vocabulary.
    "gpt2-small": TrainConfig(
        model=GPTConfig(context=1024, num_layers=12, num_heads=12, embed_dim=768),
        out_dir="runs/gpt2-small",
        steps=2000,
        batch_size=32,
        learning_rate=6e-4,
        warmup_steps=200,
    ),
}


# -------------------------------------------------------------------------------------------- data


class Text(NamedTuple):
    """The bytes to train on and those held out, with the names of the files they came from."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: list[str]
    held_out_files: list[str]

    @property
    def sha256(self) -> str:
        """A hash of both sides, which tells whether a resumed run reads the same text."""
        digest = hashlib.sha256(self.train)
        digest.update(b"|")
        digest.update(self.held_out)
        return digest.hexdigest()


def read_files(config: TrainConfig) -> list[tuple[str, bytes]]:
    """Returns (name, bytes) of every text file, sorted by name.

    In a folder, these are all files below it but the hidden ones, this run's own, and those with
    a zero byte near their start, which are no text.
    """
    default = config.data is None
    root = Path(sysconfig.get_path("stdlib") if default else config.data)
    if not root.exists():
        raise UserError(f"`data` must be a file or a folder; got {config.data!r}: no such file.")
    left_out, own = NOT_SOURCE if default else set(), Path(config.out_dir).resolve()
    paths = [root] if root.is_file() else []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place, which is how os.walk learns where not to go.
        subfolders[:] = [
            name
            for name in subfolders
            if not (name.startswith(".") or name in left_out or Path(folder, name).resolve() == own)
        ]
        paths += [
            Path(folder, name)
            for name in names
            if not name.startswith(".") and (name.endswith(".py") or not default)
        ]
    files = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"`data` must be readable; got {error}.") from error
        if content and FILE_SEPARATOR not in content[:8192]:
            files.append(
                (path.relative_to(root).as_posix() if path != root else path.name, content)
            )
    if not files:
        raise UserError(f"`data` must have text in it; found none in {str(root)!r}: pass --data.")
    return sorted(files)


def split_files(files: list[tuple[str, bytes]]) -> tuple[list, list]:
    """Splits files into those to train on and those held out, about a tenth of the bytes.

    The choice follows a hash of the name, so a file mostly keeps its side when others come or go.
    A single file is cut instead, and its end is held out.
    """
    if len(files) == 1:
        [(name, content)] = files
        cut = int(len(content) * (1 - HELD_OUT))
        return [(name, content[:cut])], [(f"{name} (end)", content[cut:])]
    total = sum(len(content) for _, content in files)
    train, held_out, size = [], [], 0
    for name, content in sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f[0])).digest()):
        # Never more than half: of a book and a note, it is the note that is held out.
        if size < HELD_OUT * total and size + len(content) <= total / 2:
            held_out.append((name, content))
            size += len(content)
        else:
            train.append((name, content))
    return train, held_out


def load_text(config: TrainConfig) -> Text:
    """Reads and splits the text, and checks that both sides are longer than the context."""
    sides = split_files(read_files(config))
    train, held_out = (
        np.frombuffer(FILE_SEPARATOR.join(content for _, content in side), np.uint8)
        for side in sides
    )
    if min(len(train), len(held_out)) <= config.model.context:
        raise UserError(
            "`context` must be below the length of both sides of the text; got a context of "
            f"{config.model.context}, {len(train)} bytes to train on and {len(held_out)} held out: "
            "give more text or a smaller --context."
        )
    return Text(train, held_out, *([name for name, _ in side] for side in sides))


def windows(text: np.ndarray, starts: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Cuts windows one longer than the context, `[parts, microbatch, context + 1]`."""
    length = config.model.context + 1
    return text[starts[:, None] + np.arange(length)].reshape(-1, config.microbatch, length)


def training_batch(text: np.ndarray, step: int, config: TrainConfig) -> np.ndarray:
    """The batch of one update: random windows, a function of (seed, step) and nothing else."""
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(text) - config.model.context, config.batch_size)
    return windows(text, starts, config)


def held_out_batches(text: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Windows spread evenly over the held-out text, the same at every look."""
    last = len(text) - config.model.context - 1
    starts = np.linspace(0, last, config.eval_batches * config.batch_size).astype(int)
    return windows(text, starts, config)


# ---------------------------------------------------------------------------------------- training


class TrainState(NamedTuple):
    """All that changes during training."""

    step: jax.Array
    params: Any
    opt_state: Any


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


def model_functions(model: GPTConfig, seed: int):
    """The model as pure functions: `init() -> params` and `loss_fn(params, tokens) -> loss`.

    Flax modules are split once, here; the training loop then carries plain dictionaries of arrays.
    """

    def init():
        return nnx.to_pure_dict(nnx.state(GPT(model, rngs=nnx.Rngs(seed))))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(model, rngs=nnx.Rngs(seed))))

    def loss_fn(params, tokens):
        return loss(nnx.merge(graphdef, params), tokens.astype(jnp.int32))

    return init, loss_fn, graphdef


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

    @jax.jit
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
    params = jax.jit(init)()

    def gradient(attention):
        implementation = dataclasses.replace(model, attention=attention)
        _, loss_fn, _ = model_functions(implementation, config.seed)
        return jax.device_get(jax.jit(jax.grad(loss_fn))(params, tokens))

    with jax.default_matmul_precision("highest"):
        ours, reference = gradient(model.attention), gradient("reference")

    def relative(path, a, b):
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        # A gradient that is not a number must win the comparison below.
        return (np.inf if np.isnan(error) else error), jax.tree_util.keystr(path)

    pairs = jax.tree_util.tree_map_with_path(relative, ours, reference)
    return max(jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple)))


# ------------------------------------------------------------------------------ the run's folder


def flat_config(config: TrainConfig) -> dict[str, Any]:
    """All settings in one dictionary, the model's among them."""
    settings = dataclasses.asdict(config)
    return {**settings.pop("model"), **settings}


class RunFolder:
    """The files of one run: opened fresh, or as a run of the same settings left them.

    Args:
        config: The settings, complete.
        text_hash: What the run reads.
        restart: Whether to delete a run found there first.

    Raises:
        UserError: The folder holds another run, or files that this script would overwrite.
    """

    def __init__(self, config: TrainConfig, text_hash: str, *, restart: bool = False):
        self.path = Path(config.out_dir).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"`out_dir` must be a folder; got the file {config.out_dir!r}.")
        found = [n for n in (METRICS, CURVES, CHECKPOINTS) if (self.path / n).exists()]
        if found and not (self.path / RUN).exists():
            raise UserError(
                f"`out_dir` must be new, or a folder of this script; got {config.out_dir!r} with "
                f"{' and '.join(found)} but no {RUN}: pass another --out-dir."
            )
        if restart:
            for name in (METRICS, CURVES):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        settings = {**flat_config(config), "text": text_hash}
        # A run without a checkpoint has nothing to lose, so its settings may be replaced.
        if any(p.name.isdigit() for p in (self.path / CHECKPOINTS).glob("*")):
            self._refuse_other_settings(settings, config.out_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / RUN, json.dumps(settings, indent=2) + "\n")

        # Orbax writes a checkpoint under another name, renames it when it is whole, and only then
        # deletes the oldest: a kill at any moment leaves the previous one as it was. What the kill
        # cut short is cleaned up here.
        self._manager = ocp.CheckpointManager(
            self.path / CHECKPOINTS,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep_checkpoints,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    def _refuse_other_settings(self, settings, out_dir):
        saved = json.loads((self.path / RUN).read_text())
        classes = (GPTConfig, TrainConfig)
        fixed = [f.name for c in classes for f in dataclasses.fields(c) if f.compare]
        changed = [
            f"{name} (there {saved.get(name)!r}, now {settings[name]!r})"
            for name in [*fixed, "text"]
            if name in settings and saved.get(name) != settings[name]
        ]
        if changed:
            raise UserError(
                f"`out_dir` must hold a run of the same settings to be resumed; got {out_dir!r}, "
                f"which differs in {', '.join(changed)}: go back to those settings, pass another "
                "--out-dir, or delete that run by --restart."
            )

    @property
    def last_step(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def resume(self, init_state) -> TrainState:
        """Returns the newest checkpoint, or the initial state, and drops the metrics after it."""
        step = self.last_step
        kept = [line for line in self.metrics() if line["step"] <= step]
        if len(kept) != step:
            raise UserError(
                f"`out_dir` must have the metrics of all {step} steps before its checkpoint; got "
                f"{len(kept)} lines in {self.path / METRICS}: --restart deletes the run."
            )
        replace_file(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        if not step:
            return init_state()
        shapes = jax.eval_shape(init_state)
        return self._manager.restore(step, args=ocp.args.StandardRestore(shapes))

    def append(self, lines: list[dict[str, Any]]):
        """Adds lines to metrics.jsonl, on the disk when this returns."""
        with open(self.path / METRICS, "a") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; a kill may have cut the last one."""
        lines = []
        if (self.path / METRICS).exists():
            for line in (self.path / METRICS).read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    lines.append(json.loads(line))
        return lines

    def save(self, step: int, state: TrainState):
        """Writes a checkpoint."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def close(self):
        """Releases what orbax holds."""
        self._manager.close()


def replace_file(path: Path, content: str):
    """Writes a file such that a kill leaves the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content)
    os.replace(temporary, path)


def plot(lines: list[dict[str, Any]], path: Path):
    """Draws the loss curves, without a display."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, losses = [x["step"] for x in lines], [x["loss"] for x in lines]
    looks = [(x["step"], x["val_loss"]) for x in lines if x["val_loss"] is not None]
    axes.plot(steps, losses, linewidth=0.8, alpha=0.6, label="training batch")
    if looks:
        axes.plot(*zip(*looks, strict=True), "o-", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------------------------------ the run


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        step: Updates done, over all the sessions of the run.
        loss: Training loss of the last update, in nats per byte.
        val_loss: Last loss on the held-out text; None if it was not looked at.
        gradient_error: Error of the gradient check; None if there was none.
        ms: Mean milliseconds per update of this session, without compilation, evaluation and
            checkpoints; None if it made no update.
        tokens_per_second: The same as a rate.
        sample: The text sample; None if the run was interrupted.
        interrupted: Whether Ctrl-C (or SIGTERM) ended the session before the run's last step.
    """

    step: int
    loss: float | None
    val_loss: float | None
    gradient_error: float | None
    ms: float | None
    tokens_per_second: float | None
    sample: str | None
    interrupted: bool


@contextlib.contextmanager
def stop_signals():
    """Turns the first Ctrl-C or SIGTERM into an entry of the list it yields.

    An exception could strike when the old state is already donated and the new one not yet there;
    a list that is read between two steps cannot. A second Ctrl-C interrupts at once.
    """
    received = []
    # Python hands signals to the main thread alone, and lets no other ask for them.
    main = threading.current_thread() is threading.main_thread()
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM) if main}

    def receive(number, frame):
        received.append(number)
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def explain_attention(config: TrainConfig):
    """What `pallas_flash.explain` says of the attention of a training step."""
    model, explanations = config.model, []

    def explain(query, key):
        explanations.append(
            pallas_flash.explain(query, key, key, is_causal=True, implementation=model.attention)
        )

    query, key = (
        jax.ShapeDtypeStruct(
            (config.microbatch, model.context, heads, model.head_dim), jnp.dtype(model.dtype)
        )
        for heads in (model.num_heads, model.kv_heads)
    )
    try:
        # Traced, because shapes and types are all it takes.
        jax.eval_shape(explain, query, key)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"`attention` must be one that serves here; got: {error}") from error
    return explanations[0]


def describe(config: TrainConfig, text: Text, params):
    """Prints what runs, on what, and through which attention."""
    model, device = config.model, jax.devices()[0]
    explanation = explain_attention(config)
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
    say("attention", f"{explanation.implementation} (asked for: {model.attention or 'auto'})")
    for line in str(explanation).splitlines():
        say("", line)
    say(
        "text",
        f"{len(text.train):,} bytes of {len(text.train_files)} files to train on, "
        f"{len(text.held_out):,} bytes of {len(text.held_out_files)} files held out",
    )


def check_gradients(config: TrainConfig, text: Text) -> float:
    """Prints the end-to-end gradient error, and stops the script if it is too large."""
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


def run_steps(config, text, folder, state, train_step, eval_step, stopped):
    """Updates the state until the last step, or until `stopped` is no longer empty.

    Returns:
        The state, and the mean milliseconds per update.
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
            ms = 1e3 * elapsed / len(pending)
            val_loss = float(eval_step(state.params, held_out)) if look else None
            lines = metric_lines(config, step, values, ms, val_loss)
            if look:
                progress.write(
                    f"step {step:6d}   loss {lines[-1]['loss']:.4f}   held out {val_loss:.4f}   "
                    f"{ms:.1f} ms/step   {tokens_per_second(config, ms):,.0f} tokens/s"
                )
            progress.set_postfix(loss=f"{lines[-1]['loss']:.3f}")
            # The lines come first, so that a checkpoint always finds all the steps before it.
            folder.append(lines)
            if save:
                folder.save(step, state)
            if stop:
                break
            pending, start = [], time.perf_counter()
    return state, 1e3 * seconds / (int(state.step) - first)


def metric_lines(config, last_step, values, ms, val_loss) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for consecutive steps; `val_loss` belongs to the last one."""
    first = last_step - len(values) + 1
    lines = [
        {
            "step": step,
            "loss": float(value["loss"]),
            "val_loss": val_loss if step == last_step else None,
            "lr": float(value["lr"]),
            "ms": ms,
            "tokens_per_second": tokens_per_second(config, ms),
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


def tokens_per_second(config: TrainConfig, ms: float) -> float:
    """Tokens trained on per second, at `ms` milliseconds per update."""
    return 1e3 * config.batch_size * config.model.context / ms


def train(config: TrainConfig, *, restart: bool = False) -> TrainResult:
    """Trains a model; resumes or reports a run found in `config.out_dir`.

    Args:
        config: The settings. A model `dtype` of None is bfloat16 on a GPU and float32 elsewhere.
        restart: Deletes a run found in `config.out_dir` instead of resuming it.

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
    text = load_text(config)
    init_state, train_step, eval_step = make_steps(config)
    describe(config, text, jax.eval_shape(init_state).params)

    with contextlib.closing(RunFolder(config, text.sha256, restart=restart)) as folder:
        error = ms = None
        finished = folder.last_step == config.steps
        if config.gradient_check and not finished:
            error = check_gradients(config, text)
        state = folder.resume(init_state)
        if finished:
            say(
                "finished",
                f"{config.out_dir} holds this run with all its {config.steps} steps: nothing to "
                "train (--restart deletes it, another --out-dir keeps it)",
            )
        else:
            if folder.last_step:
                say("resuming", f"after step {folder.last_step}, from {config.out_dir}")
            with stop_signals() as stopped:
                state, ms = run_steps(config, text, folder, state, train_step, eval_step, stopped)

        lines = folder.metrics()
        plot(lines, folder.path / CURVES)
        interrupted = int(state.step) < config.steps
        looks = [line["val_loss"] for line in lines if line["val_loss"] is not None]
        return TrainResult(
            step=int(state.step),
            loss=lines[-1]["loss"],
            val_loss=looks[-1] if looks else None,
            gradient_error=error,
            ms=ms,
            tokens_per_second=None if ms is None else tokens_per_second(config, ms),
            sample=None if interrupted else sample_text(config, state.params),
            interrupted=interrupted,
        )


# ------------------------------------------------------------------------------------- command line


def attribute_docs(cls: type) -> dict[str, str]:
    """The `Attributes` section of a class's docstring, by name: the flags' help, written once."""
    docs, name = {}, ""
    section = (cls.__doc__ or "").partition("Attributes:\n")[2]
    for line in section.splitlines():
        # A new entry is indented by eight columns, a continuation by twelve.
        if line.startswith(" " * 12):
            docs[name] += " " + line.strip()
        elif ":" in line:
            name, _, docs[name] = line.strip().partition(": ")
    return docs


CHOICES = {
    "attention": ("auto", "triton", "interpret", "xla", "reference"),
    "dtype": ("auto", "float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}


def make_parser() -> argparse.ArgumentParser:
    """A flag for every field of the two configurations; `auto` is how a flag says None."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        usage="%(prog)s [--preset NAME] [--data PATH] [--attention NAME] [--steps N] ...",
        description=summary,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="where other flags start")
    parser.add_argument(
        "--restart", action="store_true", default=False, help="delete a run found in out_dir first"
    )
    # Here, unlike in the model, the type has a default that depends on the device.
    dtype = {"dtype": "Type of the activations; auto is bfloat16 on a GPU and float32 elsewhere."}
    for title, cls, other_docs in (("model", GPTConfig, dtype), ("training", TrainConfig, {})):
        group, docs = parser.add_argument_group(title), attribute_docs(cls) | other_docs
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in ("model", "vocab_size"):
                continue
            flag = "--" + field.name.replace("_", "-")
            text = docs.get(field.name, "").replace("None", "auto")
            kind, *rest = typing.get_args(hints[field.name]) or (hints[field.name],)
            if field.name in CHOICES:
                group.add_argument(flag, choices=CHOICES[field.name], help=text)
            elif kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            else:
                metavar = kind.__name__ + (" or auto" if rest else "")
                group.add_argument(
                    flag, type=flag_type(kind, metavar), metavar=metavar.upper(), help=text
                )
    return parser


def flag_type(kind: type, name: str):
    """A parser of one flag's value that argparse calls by `name` in its errors."""

    def parse(value: str):
        return value if value == "auto" and name.endswith("auto") else kind(value)

    parse.__name__ = name
    return parse


def config_from_flags(flags: dict[str, Any]) -> TrainConfig:
    """Replaces the fields of a preset by the flags that were given."""
    config = PRESETS[flags.pop("preset")]
    values = {name: None if value == "auto" else value for name, value in flags.items()}
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    model = {name: values.pop(name) for name in values.keys() & names}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model), **values)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    start = time.perf_counter()
    flags = vars(make_parser().parse_args(argv))
    restart = flags.pop("restart")
    # To resume is to run the same again, but for what would delete the run.
    command = shlex.join(["python", sys.argv[0], *(a for a in argv if a != "--restart")])
    try:
        try:
            config = config_from_flags(flags)
        except ValueError as error:
            raise UserError(str(error)) from error
        result = train(config, restart=restart)
    except UserError as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        say("stopped", f"at once, without a new checkpoint; continue with: {command}")
        return 130

    if result.interrupted:
        say("stopped", f"after step {result.step}, checkpoint saved; resume with: {command}")
        return 130
    print(f"\n{result.sample.strip()}\n")
    speed = ""
    if result.ms is not None:
        speed = f", {result.ms:.1f} ms/step, {result.tokens_per_second:,.0f} tokens/s"
    say(
        "done",
        f"step {result.step}: loss {result.loss:.4f}, held out {result.val_loss:.4f} nats per "
        f"byte{speed}; {time.perf_counter() - start:.0f} s in all; see {config.out_dir}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
