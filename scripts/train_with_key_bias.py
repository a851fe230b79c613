"""Train one small model whose keys have large biases, by several attentions: docs/key-bias.md.

    python scripts/train_with_key_bias.py --out-dir results/          # a GPU
    python scripts/train_with_key_bias.py --steps 20 --width 64 --context 64 --batch-size 2

The model is a small Qwen2 on bytes, in bfloat16. Its key biases have the size of trained ones, tens
to hundreds in a few features, here the two slowest rotary pairs. Every run has the same parameters,
batches and optimizer; only attention differs. "dense" is `jax.nn.dot_product_attention` by XLA, and
its run in float32 is what the others should be.

The folder gets key-bias-training.csv, the loss of each step, and key-bias-training.png.
"""

import csv
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import pallas_flash
from models import Decoder
from models.config import DecoderConfig
from scripts.command import Parser, command, parse_path, parse_positive, parse_size
from scripts.train_gpt import make_optimizer
from scripts.training.settings import TrainConfig
from scripts.training.text import load_text
from scripts.training.weights import loss

NAME = "key-bias-training"
# Biases of keys in the slowest rotary features of a head, over the largest.
SHARES = (1.0, -0.6, 0.3, 0.15)
HEAD_DIM, LAYERS = 64, 4
# Steps of one call of the device, over which losses are averaged in the picture.
AT_ONCE = 20


def jax_nn(implementation: str) -> Callable:
    """Return `jax.nn.dot_product_attention` with the arguments that `Decoder` gives."""

    def attend(q, k, v, *, scale, is_causal, **absent):
        del absent
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=is_causal, implementation=implementation
        )

    return attend


def runs() -> dict[str, tuple[str, Callable]]:
    """Return the dtype and the attention of each run by its name."""
    found = {
        "dense, float32": ("float32", jax_nn("xla")),
        "dense": ("bfloat16", jax_nn("xla")),
        "pallas_flash": ("bfloat16", pallas_flash.attention),
    }
    if jax.default_backend() == "gpu":
        found["cuDNN"] = ("bfloat16", jax_nn("cudnn"))
    return found


def make_model(width: int, context: int, dtype: str, bias: float) -> Decoder:
    """Return a Qwen2 with random weights, whose largest key bias is `bias`."""
    heads = 2 * max(width // HEAD_DIM // 2, 1)
    fields = {
        "model_type": "qwen2",
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    config = dataclasses.replace(DecoderConfig.from_json(json.dumps(fields)), dtype=dtype)
    model, half = Decoder(config, rngs=nnx.Rngs(0)), HEAD_DIM // 2
    # Rotary positions turn feature i with feature i + H/2; the last pairs turn the slowest.
    where = jnp.array([half - 1, HEAD_DIM - 1, half - 2, HEAD_DIM - 2])
    of_head = jnp.zeros(HEAD_DIM).at[where].set(bias * jnp.array(SHARES))
    for layer in model.layers:
        layer.attention.key.bias[...] = jnp.tile(of_head, heads // 2)
    return model


def train(attend: Callable, model: Decoder, text: np.ndarray, steps: int, batch: int):
    """Return the loss of each step, in nats per byte."""
    graphdef, params = nnx.split(model)
    settings = dict(steps=steps, warmup_steps=steps // 10, learning_rate=1e-3)
    optimizer, _ = make_optimizer(TrainConfig(**settings))
    context, text = model.config.context, jnp.asarray(text)

    def step(state, number):
        params, memory = state
        key = jax.random.fold_in(jax.random.key(0), number)
        starts = jax.random.randint(key, (batch, 1), 0, len(text) - context)
        tokens = text[starts + jnp.arange(context + 1)].astype(jnp.int32)
        value, gradient = jax.value_and_grad(
            lambda params: loss(nnx.merge(graphdef, params), tokens, None)
        )(params)
        updates, memory = optimizer.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    @functools.partial(jax.jit, donate_argnums=0)
    def several(state, numbers):
        return jax.lax.scan(step, state, numbers)

    state, losses = (params, optimizer.init(params)), []
    # The model looks its attention up while it is traced.
    with mock.patch.object(pallas_flash, "attention", attend):
        for first in range(0, steps, AT_ONCE):
            numbers = jnp.arange(first, min(first + AT_ONCE, steps))
            state, found = several(state, numbers)
            losses.append(found)
    return np.concatenate([np.asarray(x, np.float64) for x in losses])


def draw(losses: dict[str, np.ndarray]) -> Figure:
    """Draw the losses, and their differences to the run in float32."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    curves, differences = figure.subplots(1, 2)

    def mean(x):
        size = min(AT_ONCE, len(x))
        return x[: len(x) // size * size].reshape(-1, size).mean(1)

    [(_, exact), *_] = losses.items()
    for n, (name, x) in enumerate(losses.items()):
        # Dashes show what lies below.
        look = dict(label=name, color=f"C{n}", linestyle=(0, (4, n)), linewidth=1.5)
        steps = np.arange(1, len(mean(x)) + 1) * min(AT_ONCE, len(x))
        curves.plot(steps, mean(x), **look)
        if x is not exact:
            differences.plot(steps, mean(x - exact), **look)
    curves.set(xlabel="step", ylabel=f"loss, nats per byte, mean of {AT_ONCE} steps")
    differences.set(xlabel="step", ylabel="difference to dense attention in float32")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--steps", type=parse_size, default=2000, metavar="INT", help="updates of each run")
    add("--width", type=parse_size, default=512, metavar="INT", help="size of residual stream")
    add("--context", type=parse_size, default=1024, metavar="INT", help="tokens of a sequence")
    add("--batch-size", type=parse_size, default=8, metavar="INT", help="sequences of an update")
    add("--key-bias", type=parse_positive, default=200.0, metavar="X", help="largest key bias")
    add("--out-dir", type=parse_path, default=Path(), metavar="FOLDER", help="folder of results")
    flags = parser.parse_args(argv)
    text = load_text(TrainConfig()).train
    losses = {}
    for name, (dtype, attend) in runs().items():
        start = time.perf_counter()
        model = make_model(flags.width, flags.context, dtype, flags.key_bias)
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            losses[name] = train(attend, model, text, flags.steps, flags.batch_size)
        last = losses[name][-100:].mean()
        seconds = time.perf_counter() - start
        print(f"{name}: mean loss of the last steps {last:.4f}, {seconds:.0f} s", flush=True)
    flags.out_dir.mkdir(parents=True, exist_ok=True)
    with open(flags.out_dir / f"{NAME}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *losses])
        rows = np.stack(list(losses.values()), 1)
        writer.writerows([n, *(f"{x:.6f}" for x in row)] for n, row in enumerate(rows, 1))
    draw(losses).savefig(flags.out_dir / f"{NAME}.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
