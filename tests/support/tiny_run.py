"""A training run of seconds, and helpers that the tests of `python -m models.train` share.

`corpus`, `config`, `finished` and `compile_once` are fixtures of conftest.py.
"""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from models.training import loop
from models.training.mesh import make_layout
from models.training.settings import SHAPE, TrainConfig, model_config

STEPS = 12

# Checkpoints at 5, 10 and the end, so that kills fall before the first and between two.
TINY = TrainConfig(
    **dict(num_layers=1, num_heads=2, num_kv_heads=1, features=16),
    context=12,
    dtype="float32",
    attention="reference",
    steps=STEPS,
    batch_size=4,
    accumulation=2,
    learning_rate=1e-2,
    warmup_steps=2,
    eval_every=4,
    eval_batches=2,
    log_every=3,
    checkpoint_every=5,
    keep_checkpoints=2,
    gradient_check=False,
)


@contextlib.contextmanager
def compiling_into(folder):
    """Keep every compiled program, in the folder of earlier runs where JAX has one.

    Nearly all the time would go into compiling one tiny model again and again.
    """
    options = {
        "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir or str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    # JAX looks at the folder once; it may have looked before these tests.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def flags(config, **changes):
    """Return the command line of a configuration."""
    values = {**dataclasses.asdict(config), **changes}
    if values["init_from"] is not None:
        values = {name: x for name, x in values.items() if name not in SHAPE}
    argv = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            argv += [flag, str(value)]
    return argv


@functools.cache
def one_device():
    return make_layout(TINY, model_of(TINY))


def model_of(config):
    """Return the model of a run on bytes."""
    return model_config(config, 256)


def metrics(config):
    """Return the lines of metrics.jsonl without measured times."""
    lines = [json.loads(x) for x in Path(config.out_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: line[k] for k in ("step", "loss", "val_loss", "lr")} for line in lines]


def checkpoint_steps(config):
    names = [p.name for p in Path(config.out_dir, "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def parameters_of(config):
    init, _ = loop.model_functions(model_of(config), 0, one_device())
    return jax.eval_shape(init)
