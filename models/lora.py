"""Adapters of low rank (LoRA, https://arxiv.org/abs/2106.09685): small matrices that tune a model.

    merged weight = weight + alpha / rank * b @ a          a [rank, inputs], b [outputs, rank]

An adapter is a tree of its own, {name: {"a": a, "b": b}}, by the names that the matrices have in
the family's files: where queries, keys and values are one matrix there, they share an `a`. `b`
begins at zero, so that the first loss is the model's. A loss of the adapter alone is

    lambda adapter: loss(merged(config, params, adapter, alpha))

The package peft reads and writes the same folders: adapter_config.json, adapter_model.safetensors.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models import checkpoint
from models.checkpoint import Stored
from models.config import DecoderConfig
from models.families import json_object
from models.rope import is_number

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The matrices of attention and of the MLP, by their paths in `Decoder`.
MATRICES = re.compile(r"^layers/\d+/(attention/(query|key|value|out)|mlp/(gate|up|down))/weight$")
# The beginning of peft's names, and what the text part of a model with images has after it.
PREFIX = "base_model.model."
TEXT_PART = re.compile(r"^(language_model\.model|model\.language_model)\.")
# Fields of adapter_config.json with the values that `merged` computes, of which a file may have
# any; and fields that say nothing about the sum. A field that is null, false or empty is left out.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "task_type": ("CAUSAL_LM",),
    # Others change the weights of the model, too.
    "init_lora_weights": (True, "gaussian", "orthogonal"),
}
NO_EFFECT = {
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
}


def matrices(config: DecoderConfig, params: Any) -> dict[str, Stored]:
    """Return the matrices that an adapter may tune, by their names in the family's files."""
    paths = [path for path in checkpoint.leaves_by_path(params) if MATRICES.match(path)]
    stored = checkpoint.layout_of_files(config, paths)
    return {name.removesuffix(".weight"): x for name, x in stored.items()}


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the names of matrices without their layers, each once: "q_proj" and so on."""
    return sorted({name.rpartition(".")[2] for name in names})


def init(
    key: jax.Array,
    config: DecoderConfig,
    params: Any,
    rank: int,
    targets: Sequence[str] | None = None,
) -> Any:
    """Return a new adapter, in float32.

    Args:
        key: A random key.
        config: The model's configuration.
        params: The model's parameters, or their shapes.
        rank: Number of rows of each `a`; at most the smaller size of each matrix.
        targets: Last parts of the names of the matrices to tune, such as "q_proj". None is all of
            attention and of the MLP.

    Raises:
        ValueError: A target is no matrix of the family, or the rank is no size, or too large.
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank` must be an int of at least 1; got {rank!r}.")
    there, leaves = matrices(config, params), checkpoint.leaves_by_path(params)
    names = last_parts(there)
    targets = names if targets is None else targets
    wrong = [targets] if isinstance(targets, str) else [x for x in targets if x not in names]
    if wrong or not targets:
        got = repr(wrong[0] if wrong else targets)
        raise ValueError(f"`targets` must be some of {', '.join(names)}; got {got}.")
    adapter = {}
    for number, (name, (paths, _)) in enumerate(there.items()):
        if name.rpartition(".")[2] in targets:
            shape = rank, leaves[paths[0]].shape[1]
            rows = sum(leaves[path].shape[0] for path in paths)
            if rank > (most := min(rows, shape[1])):
                raise ValueError(
                    f"`rank` must be at most {most}, the smaller size of {name}; got {rank}: take "
                    "a smaller one, or leave that matrix out of `targets`."
                )
            bound = shape[1] ** -0.5
            a = jax.random.uniform(
                jax.random.fold_in(key, number), shape, jnp.float32, -bound, bound
            )
            adapter[name] = {"a": a, "b": jnp.zeros((rows, rank), jnp.float32)}
    return adapter


def merged(
    config: DecoderConfig, params: Any, adapter: Any, alpha: float, dtype: str | None = None
) -> Any:
    """Return the parameters with the adapter added.

    Args:
        config: The model's configuration.
        params: The model's parameters; they and the adapter may be arrays of NumPy.
        adapter: The adapter.
        alpha: Multiplies the products, over the rank.
        dtype: Type of what is returned. By default a sum has the wider of the two types, and other
            parameters keep theirs.
    """
    leaves, there, new = checkpoint.leaves_by_path(params), matrices(config, params), {}
    for name, x in adapter.items():
        first, scale = 0, alpha / len(x["a"])
        with jax.default_matmul_precision("highest"):
            update = scale * jnp.dot(x["b"], x["a"])
        for path in there[name].paths:
            size = len(leaves[path])
            total = leaves[path] + update[first : first + size]
            new[path] = total if dtype is None else total.astype(dtype)
            first += size

    def choose(path, x):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        return new[path] if path in new else x if dtype is None else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(choose, params)


def save(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    params: Any,
    adapter: Any,
    alpha: float,
    base: str | None = None,
) -> None:
    """Write an adapter, such that peft reads it.

    Args:
        folder: A new folder, or an empty one.
        config: The model's configuration.
        params: The model's parameters, or their shapes.
        adapter: The adapter.
        alpha: Its alpha.
        base: Name or folder of the model's weights.

    Raises:
        ValueError: There are files in the folder.
    """
    folder, there = pathlib.Path(folder), matrices(config, params)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"`folder` must be new or empty; got {str(folder)!r} with files in it.")
    folder.mkdir(parents=True, exist_ok=True)
    stored, leaves = {}, checkpoint.leaves_by_path(adapter)
    for name in sorted(adapter):
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            stored[f"{PREFIX}{name}.{theirs}.weight"] = Stored([f"{name}/{ours}"], False)
    checkpoint.write_file(folder / WEIGHTS, stored, leaves)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(next(iter(adapter.values()))["a"]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": last_parts(adapter),
        # Whether the files have matrices as [inputs, outputs].
        "fan_in_fan_out": any(there[name].transposed for name in adapter),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(folder: str | pathlib.Path, config: DecoderConfig, params: Any) -> tuple[Any, float]:
    """Return the adapter of a folder, and its alpha.

    Args:
        folder: The folder.
        config: The model's configuration.
        params: The model's parameters, or their shapes.

    Raises:
        ValueError: A file is missing or damaged, a field or tensor is one that `merged` does not
            compute, or a tensor does not fit the model.
    """
    folder = pathlib.Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"`folder` must have {CONFIG} and {WEIGHTS}; got {str(folder)!r} without {name}."
            )
    fields = json_object(folder / CONFIG, (folder / CONFIG).read_bytes())
    for name, x in fields.items():
        if x and name not in NO_EFFECT and x not in COMPUTED.get(name, ()):
            raise ValueError(
                f"{folder / CONFIG} must have fields that this code computes; got {name!r} with "
                f"{x!r:.60}."
            )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or not is_number(alpha):
        raise ValueError(
            f"{folder / CONFIG} must have numbers `r` and `lora_alpha`; got {rank!r} and {alpha!r}."
        )
    tensors = checkpoint.open_file(folder / WEIGHTS)
    there, leaves, adapter = matrices(config, params), checkpoint.leaves_by_path(params), {}
    for name, x in tensors.items():
        module, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        module = TEXT_PART.sub("model.", module)
        letter = {"A.weight": "a", "B.weight": "b"}.get(part)
        if letter is None or module not in there:
            raise ValueError(
                f"{folder / WEIGHTS} must have pairs of matrices of the model's attention and MLP; "
                f"got {name!r}."
            )
        paths = there[module].paths
        rows = sum(leaves[path].shape[0] for path in paths)
        wanted = {"a": (rank, leaves[paths[0]].shape[1]), "b": (rows, rank)}[letter]
        if x.shape != wanted:
            raise ValueError(f"{name!r} must have the shape {wanted}; got {x.shape}.")
        adapter.setdefault(module, {})[letter] = jnp.array(x, jnp.float32)
    if not adapter or any(len(x) < 2 for x in adapter.values()):
        raise ValueError(
            f"{folder / WEIGHTS} must have both matrices of each pair; got "
            f"{'one alone' if adapter else 'none'}."
        )
    return adapter, float(alpha)
