"""Folders with config.json and weights in the safetensors layout: what is in them, and how.

A safetensors file has 8 bytes (the length n of the header, little-endian), n bytes of JSON, which
gives the dtype, the shape and the place of each tensor, and the bytes of the tensors. The package
safetensors checks all of the header. NumPy maps the file into memory, and JAX copies each device's
part of one tensor at a time: safetensors would copy each tensor into memory before.
"""

import functools
import json
import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.families import json_object
from models.sharding import Layout, rule

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# The module at a path of `Decoder`, with # for the number of a layer, and its name in the file.
_LLAMA = {
    "embedding": "model.embed_tokens",
    "layers/#/attention_norm": "model.layers.#.input_layernorm",
    "layers/#/attention": "model.layers.#.self_attn",
    "layers/#/attention/query": "model.layers.#.self_attn.q_proj",
    "layers/#/attention/key": "model.layers.#.self_attn.k_proj",
    "layers/#/attention/value": "model.layers.#.self_attn.v_proj",
    "layers/#/attention/out": "model.layers.#.self_attn.o_proj",
    "layers/#/attention/query_norm": "model.layers.#.self_attn.q_norm",
    "layers/#/attention/key_norm": "model.layers.#.self_attn.k_norm",
    "layers/#/mlp_norm": "model.layers.#.post_attention_layernorm",
    "layers/#/mlp/gate": "model.layers.#.mlp.gate_proj",
    "layers/#/mlp/up": "model.layers.#.mlp.up_proj",
    "layers/#/mlp/down": "model.layers.#.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_GEMMA = _LLAMA | {
    "layers/#/attention_post_norm": "model.layers.#.post_attention_layernorm",
    "layers/#/mlp_norm": "model.layers.#.pre_feedforward_layernorm",
    "layers/#/mlp_post_norm": "model.layers.#.post_feedforward_layernorm",
}
# Norms come after attention and after the MLP alone.
_OLMO2 = _LLAMA | {
    "layers/#/attention_post_norm": "model.layers.#.post_attention_layernorm",
    "layers/#/mlp_post_norm": "model.layers.#.post_feedforward_layernorm",
}
# Matrices of one input are one.
_PHI3 = _LLAMA | {
    "layers/#/attention/query": "model.layers.#.self_attn.qkv_proj",
    "layers/#/attention/key": "model.layers.#.self_attn.qkv_proj",
    "layers/#/attention/value": "model.layers.#.self_attn.qkv_proj",
    "layers/#/mlp/gate": "model.layers.#.mlp.gate_up_proj",
    "layers/#/mlp/up": "model.layers.#.mlp.gate_up_proj",
}
# Queries, keys and values are one matrix, and matrices are [inputs, outputs].
_GPT2 = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "layers/#/attention_norm": "transformer.h.#.ln_1",
    "layers/#/attention/query": "transformer.h.#.attn.c_attn",
    "layers/#/attention/key": "transformer.h.#.attn.c_attn",
    "layers/#/attention/value": "transformer.h.#.attn.c_attn",
    "layers/#/attention/out": "transformer.h.#.attn.c_proj",
    "layers/#/mlp_norm": "transformer.h.#.ln_2",
    "layers/#/mlp/up": "transformer.h.#.mlp.c_fc",
    "layers/#/mlp/down": "transformer.h.#.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
# The names of a family's modules, if they are not Llama's.
NAMES = {"gpt2": _GPT2, "gemma2": _GEMMA, "gemma3_text": _GEMMA, "olmo2": _OLMO2, "phi3": _PHI3}
# Constants that older files have beside the parameters: causal masks and frequencies.
CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
# The beginnings of names in files of other models: without a head, and with images, as Gemma 3's
# first files and its newer ones have them.
PREFIXES = ("", "language_model.model.", "model.language_model.", "language_model.")
IMAGES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


class Stored(NamedTuple):
    """A tensor of a file.

    Attributes:
        paths: The parameters that it holds, one after the other along the outputs.
        transposed: Whether it is [inputs, outputs].
    """

    paths: list[str]
    transposed: bool


def layout_of_files(config: DecoderConfig, paths: list[str]) -> dict[str, Stored]:
    """Return, by name, the tensors that hold the parameters at these paths."""
    kind = json.loads(config.source or "{}").get("model_type", "llama")
    names = NAMES.get(kind, _LLAMA)
    order, stored = list(names), {}
    numbered = {path: re.sub(r"(?<=/)\d+(?=/)", "#", path).rpartition("/") for path in paths}
    for path in sorted(paths, key=lambda path: order.index(numbered[path][0])):
        module, _, parameter = numbered[path]
        number = re.findall(r"/(\d+)/", path)
        name = names[module].replace("#", number[0] if number else "") + "." + parameter
        transposed = kind == "gpt2" and bool(number) and parameter == "weight"
        transposed = transposed and not module.endswith("norm")
        stored.setdefault(name, Stored([], transposed)).paths.append(path)
    return stored


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, as in `layers/0/mlp/up/weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


# ------------------------------------------------------------------------------------------ reading


def weights_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """Return a folder of weights: itself, or `weights/` of a run; None without any."""
    inside = (x for x in (folder / "weights", folder) if (x / CONFIG).is_file())
    return next(inside, None)


def open_folder(folder: pathlib.Path) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of config.json, and every tensor by name, mapped into memory.

    Raises:
        ValueError: A file is missing, damaged or not what its name says.
    """
    for name in (CONFIG, INDEX if (folder / INDEX).exists() else WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(
                f"`folder` must have {CONFIG} and {WEIGHTS} or {INDEX}; got {str(folder)!r} "
                f"without {name}. Weights in another format must be saved as safetensors first."
            )
    text = _text(folder / CONFIG)
    json_object(folder / CONFIG, text)
    if not (folder / INDEX).exists():
        return text, open_file(folder / WEIGHTS)
    index = json_object(folder / INDEX, _text(folder / INDEX)).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(x, str) for x in index.values()):
        raise ValueError(
            f"{folder / INDEX} must give the name of a file for each tensor in `weight_map`; got "
            f"{index!r:.80}."
        )
    tensors = {}
    for file in sorted(set(index.values())):
        # A path could lead out of the folder.
        if not file.endswith(".safetensors") or any(x in file for x in "/\\\0"):
            raise ValueError(
                f"{folder / INDEX} must name safetensors files of its folder; got {file!r}."
            )
        if not (folder / file).is_file():
            raise ValueError(f"`folder` must have every file of {INDEX}; got none called {file!r}.")
        there = open_file(folder / file)
        listed = {name for name, where in index.items() if where == file}
        absent = {name for name in listed - there.keys() if not CONSTANTS.search(name)}
        if wrong := absent | (there.keys() & tensors.keys()):
            raise ValueError(
                f"{folder / INDEX} must name the one file that has a tensor; got {file!r} for "
                f"{_some(wrong)}."
            )
        tensors |= there
    return text, tensors


def _text(path: pathlib.Path) -> str:
    """Return the text of a file, which may begin with a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text; got {error}.") from None


def open_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name, mapped into memory.

    Raises:
        ValueError: The file is damaged, or has a dtype other than the float types of `DTYPES`.
    """
    try:
        import safetensors
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} needs the package safetensors: run pip install -e '.[models]'."
        ) from None
    try:
        with safetensors.safe_open(path, "numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} must be a whole safetensors file; got {path.stat().st_size} bytes, which is "
            f"cut short or damaged: {error}."
        ) from None
    with open(path, "rb") as file:
        header = json.loads(
            file.read(int.from_bytes(file.read(8), "little")),
            object_pairs_hook=functools.partial(_each_once, path),
        )
        begin, size = file.tell(), file.seek(0, 2)
    header.pop("__metadata__", None)
    # NumPy maps no empty files.
    empty = np.empty(0, np.uint8)
    data = np.memmap(path, np.uint8, mode="r", offset=begin) if begin < size else empty
    tensors = {}
    for name, entry in header.items():
        if CONSTANTS.search(name):
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path} must have tensors of {', '.join(DTYPES)}; got {entry['dtype']} for "
                f"{name!r}: quantised weights are not read."
            )
        first, last = entry["data_offsets"]
        content = empty if first == last else data[first:last]
        tensors[name] = content.view(jnp.dtype(DTYPES[entry["dtype"]])).reshape(entry["shape"])
    return tensors


def _each_once(path: pathlib.Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these names and values."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"{path} must have each name once; got {twice!r} twice.")
    return content


def _named_as(stored: dict[str, Stored], tensors: Mapping[str, Any]) -> dict[str, Stored]:
    """Return `stored` with the names of the file: see `PREFIXES`."""
    ours = re.compile(r"^(model|transformer)\.(?!language_model\.)")
    if any(ours.match(name) and not IMAGES.match(name) for name in tensors):
        return stored
    first = re.compile(r"(embed_tokens|wte)\.weight$")
    prefixes = {first.sub("", name) for name in tensors if first.search(name)}
    prefix = next((x for x in PREFIXES if x in prefixes), "")
    head = "language_model.lm_head." if prefix == "language_model.model." else "lm_head."
    names = {name: re.sub("^lm_head.", head, ours.sub(prefix, name)) for name in stored}
    return {names[name]: x for name, x in stored.items()}


def embedding_dtype(config: DecoderConfig, tensors: dict[str, np.ndarray]) -> str:
    """Return the dtype of the embedding in a file."""
    [name] = _named_as(layout_of_files(config, ["embedding/weight"]), tensors)
    if name not in tensors:
        raise ValueError(f"the weights must have {name!r}; got {_some(tensors)}.")
    return str(tensors[name].dtype)


def read(
    config: DecoderConfig,
    shapes: Any,
    tensors: dict[str, np.ndarray],
    layout: Layout | None,
    dtype: str | None,
) -> Any:
    """Return a tree of parameters in the form of `shapes`, read from the tensors.

    Args:
        config: The model's configuration.
        shapes: A tree with the shape of each parameter.
        tensors: The tensors by name.
        layout: The shardings of the parameters; None for one device.
        dtype: Type of the parameters; None is each tensor's.

    Raises:
        ValueError: A tensor is missing, unexpected or of another shape.
    """
    wanted = leaves_by_path(shapes)
    stored = _named_as(layout_of_files(config, list(wanted)), tensors)
    _check_names(config, stored, tensors)
    read = {}
    for name, (paths, transposed) in stored.items():
        whole = tensors[name].T if transposed and tensors[name].ndim == 2 else tensors[name]
        sizes = [wanted[path].shape[0] for path in paths]
        shape = (sum(sizes), *wanted[paths[0]].shape[1:])
        if whole.shape != shape:
            there = shape[::-1] if transposed else shape
            raise ValueError(
                f"{name!r} must have the shape {there}, which {CONFIG} gives; got "
                f"{tensors[name].shape}."
            )
        parts = np.split(whole, np.cumsum(sizes)[:-1]) if len(paths) > 1 else [whole]
        for path, part in zip(paths, parts, strict=True):
            read[path] = _to_devices(path, part, layout, dtype)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: read[jax.tree_util.keystr(path, simple=True, separator="/")], shapes
    )


def _to_devices(path: str, x: np.ndarray, layout: Layout | None, dtype: str | None) -> jax.Array:
    wanted = x.dtype if dtype is None else jnp.dtype(dtype)
    if layout is None:
        return jnp.array(x, wanted)
    sharding = layout.sharding(*rule(path))
    try:
        return jax.make_array_from_callback(
            x.shape, sharding, lambda index: np.array(x[index]).astype(wanted)
        )
    except ValueError as error:
        raise ValueError(
            f"`layout` must divide {path} of shape {x.shape} evenly; got {sharding.spec} on the "
            f"mesh {dict(layout.mesh.shape)}."
        ) from error


def _check_names(config: DecoderConfig, stored: dict[str, Stored], tensors: dict[str, np.ndarray]):
    """Raise unless the tensors have the names of the model's."""
    if missing := sorted(stored.keys() - tensors.keys()):
        raise ValueError(f"the weights must have {_some(missing)}, which the file has not.")
    left = sorted(tensors.keys() - stored.keys())
    if of_images := [name for name in left if IMAGES.match(name)]:
        left = [name for name in left if not IMAGES.match(name)]
        warnings.warn(
            f"only the text part is read: {len(of_images)} tensors of images are left out",
            stacklevel=4,
        )
    if config.tied and len(left) == 1 and left[0].endswith("lm_head.weight"):
        [embedding] = (x for x in stored if "embed" in x or "wte" in x)
        if np.array_equal(tensors[left[0]], tensors[embedding]):
            return
        raise ValueError(
            f"{left[0]!r} must equal {embedding!r}, because `tie_word_embeddings` is true; "
            "got another matrix."
        )
    if left:
        raise ValueError(
            f"the weights must have only tensors that {CONFIG} leads to; got {_some(left)}, too."
        )


def _some(names) -> str:
    """Return the first of some names, and the number of the others."""
    first, *rest = sorted(names) or ["nothing"]
    return f"{first!r}" + (f" and {len(rest)} more" if rest else "")


# ------------------------------------------------------------------------------------------ writing


def write(folder: pathlib.Path, config: DecoderConfig, params: Any, max_file_bytes: int) -> None:
    """Write config.json and the parameters; see `Decoder.save_pretrained`."""
    if config.source is None:
        raise ValueError(
            "`config` must come from a config.json to be saved; got one that does not: make it by "
            "`DecoderConfig.from_json`."
        )
    leaves = leaves_by_path(params)
    # Arrays of NumPy have no devices.
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves.values()):
        raise ValueError(
            "`params` must be on devices of this process; got arrays that several processes share: "
            "gather them first."
        )
    if folder.is_dir() and (there := sorted(folder.glob("*.safetensors*"))):
        raise ValueError(
            f"`folder` must have no weights, or be new; got {str(folder)!r} with {there[0].name}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    stored = layout_of_files(config, list(leaves))
    files, size = [[]], 0
    for name in sorted(stored):
        more = sum(leaves[path].nbytes for path in stored[name].paths)
        if files[-1] and size + more > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += more
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    if len(files) == 1:
        names = [WEIGHTS]
    for file, inside in zip(names, files, strict=True):
        write_file(folder / file, {name: stored[name] for name in inside}, leaves)
    if len(files) > 1:
        index = {name: file for file, inside in zip(names, files, strict=True) for name in inside}
        total = {"total_size": sum(x.nbytes for x in leaves.values())}
        content = {"metadata": total, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    content = json.loads(config.source)
    dtype = str(leaves["embedding/weight"].dtype)
    content["dtype" if "dtype" in content else "torch_dtype"] = dtype
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_file(path: pathlib.Path, stored: dict[str, Stored], params: dict[str, jax.Array]):
    """Write a safetensors file, one tensor at a time."""
    letters = {dtype: name for name, dtype in DTYPES.items()}
    # The libraries that read such files ask which one wrote it, and know this answer.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (paths, transposed) in stored.items():
        first = params[paths[0]]
        shape = [sum(params[path].shape[0] for path in paths), *first.shape[1:]]
        end = begin + sum(params[path].nbytes for path in paths)
        header[name] = {
            "dtype": letters[str(first.dtype)],
            "shape": shape[::-1] if transposed else shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for paths, transposed in stored.values():
            parts = [np.asarray(params[path]) for path in paths]
            whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
            file.write(np.ascontiguousarray(whole.T if transposed else whole).view(np.uint8).data)
