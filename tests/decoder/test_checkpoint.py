"""Folders of weights: what is written is read, on several devices too, and mistakes are named."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from support import eight_devices
from support.decoder_files import FILES, make

from models import Decoder, checkpoint
from models.generation import Generation, Sampling
from models.sharding import AXES, Layout


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def state_of(model):
    return checkpoint.leaves_by_path(nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.parametrize("max_bytes", [10**9, 3000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FILES)
def test_saved_and_loaded_and_saved_again(family, dtype, max_bytes, tmp_path):
    model = make(family, dtype=dtype)
    model.save_pretrained(tmp_path / "first", max_bytes)
    again = Decoder.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second", max_bytes)
    first, second = files_of(tmp_path / "first"), files_of(tmp_path / "second")
    assert first == second
    assert (len(first) == 2) == (max_bytes == 10**9)
    assert json.loads(first["config.json"])["torch_dtype"] == dtype
    assert again.config.compute_dtype == dtype
    for path, x in state_of(model).items():
        np.testing.assert_array_equal(state_of(again)[path], x, err_msg=path)


def test_dtypes_may_be_chosen(tmp_path):
    make("llama", dtype="bfloat16").save_pretrained(tmp_path)
    model = Decoder.from_pretrained(tmp_path, dtype="bfloat16", param_dtype="float32")
    assert {x.dtype for x in state_of(model).values()} == {jnp.dtype("float32")}
    assert model.config.compute_dtype == "bfloat16"


def rewritten(folder, change):
    """Write the tensors of a folder anew, after a change to the dictionary of them."""
    path = folder / "model.safetensors"
    tensors = {name: np.array(x) for name, x in checkpoint.open_file(path).items()}
    change(tensors)
    header, data = {}, b""
    for name, x in tensors.items():
        kind = {np.dtype("float32"): "F32", np.dtype("bool"): "BOOL"}[x.dtype]
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": kind, "shape": x.shape, "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


UP = "model.layers.1.mlp.up_proj.weight"
CHANGES = {
    "missing": (lambda x: x.pop(UP), f"must have '{UP}'"),
    "unexpected": (lambda x: x.update(extra=x[UP]), "got 'extra', too"),
    "misshapen": (
        lambda x: x.update({UP: x[UP].T.copy()}),
        f"'{UP}' must have the shape (24, 16), which config.json gives; got (16, 24)",
    ),
    "kind": (lambda x: x.update({UP: x[UP] > 0}), f"got BOOL for '{UP}'"),
    "head": (
        lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"] + 1}),
        "'lm_head.weight' must equal 'model.embed_tokens.weight'",
    ),
    "empty": (lambda x: x.clear(), "must have 'embed_tokens.weight'; got 'nothing'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_tensor_is_named(name, tmp_path):
    change, said = CHANGES[name]
    make("qwen2").save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ValueError) as error:
        Decoder.from_pretrained(tmp_path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWICE = b'{"a": %b, "a": %b}' % ((json.dumps(TENSOR).encode(),) * 2)
FIRST = "model.norm.weight"


def bytes_of(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# What a file of weights is.
DAMAGED_FILES = {
    "empty": (b"", "got 0 bytes, which is cut short"),
    "short": (b"abc", "got 3 bytes"),
    "text": (b"x" * 999, "a whole safetensors file"),
    "header": (bytes_of(TENSOR)[:40], "a whole safetensors file"),
    "length": (b"\xff" * 16, "a whole safetensors file"),
    "no JSON": (bytes_of(b"{x"), "a whole safetensors file"),
    "no UTF-8": (bytes_of(b"\xff"), "a whole safetensors file"),
    "nested": (bytes_of(b"[" * 10**5), "a whole safetensors file"),
    "list": (bytes_of([1]), "a whole safetensors file"),
    "twice": (bytes_of(TWICE), "must have each name once; got 'a' twice"),
    "overlap": (bytes_of({"a": TENSOR, "b": TENSOR}), "a whole safetensors file"),
    "more data": (bytes_of({"a": TENSOR}, bytes(9)), "a whole safetensors file"),
    "cut": (bytes_of({"a": TENSOR}, bytes(7)), "which is cut short"),
    "quantised": (
        bytes_of({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}),
        "got F8_E4M3 for 'a': quantised weights are not read",
    ),
    **{
        f"{name} {value!r:.20}": (bytes_of({"a": TENSOR | {name: value}}), "a whole safetensors")
        for name, values in {
            "dtype": ["X", [], None],
            "shape": [[2.0], [-2], [3], [2**62, 4], [2**64], [True], "2", None],
            "data_offsets": [[-8, 0], [4, 12], [0, 16], [8, 0], [0.0, 8.0], [0], {}],
        }.items()
        for value in values
    },
    **{f"entry {x!r}": (bytes_of({"a": x}), "a whole safetensors") for x in (5, [1], {}, None)},
}


def index_of(**files):
    return {"weight_map": files}


# What the index of shards is. The file of weights beside it has all tensors.
DAMAGED_INDEXES = {
    "no map": ({}, "must give the name of a file for each tensor in `weight_map`; got None"),
    "list": ({"weight_map": [WEIGHTS]}, "must give the name of a file"),
    "number": (index_of(a=3), "must give the name of a file"),
    "parent": (index_of(a="../x.safetensors"), "files of its folder; got '../x.safetensors'"),
    "absolute": (index_of(a="/x.safetensors"), "files of its folder; got '/x.safetensors'"),
    "backslash": (index_of(a="..\\x.safetensors"), "safetensors files of its folder"),
    "zero": (index_of(a="\0.safetensors"), "safetensors files of its folder"),
    "other file": (index_of(a="config.json"), "files of its folder; got 'config.json'"),
    "absent file": (index_of(a="x.safetensors"), "got none called 'x.safetensors'"),
    "absent tensor": (index_of(a=WEIGHTS), "got 'model.safetensors' for 'a'"),
    "two files": (index_of(**{FIRST: WEIGHTS, "z": "z.safetensors"}), "has a tensor; got 'z.safe"),
    "none": (index_of(), "must have 'embed_tokens.weight'; got 'nothing'"),
}


def damage_index(folder, index):
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "z.safetensors").write_bytes(bytes_of({FIRST: TENSOR}))


DAMAGES = {
    "absent": (lambda f: (f / WEIGHTS).unlink(), "without model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "without config.json"),
    "config": (lambda f: (f / "config.json").write_text("{"), "config.json must be JSON"),
    "config list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "config deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "must be JSON; got max"),
    "config bytes": (lambda f: (f / "config.json").write_bytes(b"{\xff"), "must be UTF-8 text"),
    "index text": (lambda f: (f / INDEX).write_text("{"), "index.json must be JSON"),
} | {
    f"{kind} {name}": (functools.partial(damage, content=content), said)
    for kind, damage, table in (
        ("file", lambda f, content: (f / WEIGHTS).write_bytes(content), DAMAGED_FILES),
        ("index", lambda f, content: damage_index(f, content), DAMAGED_INDEXES),
    )
    for name, (content, said) in table.items()
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    make("llama").save_pretrained(folder := tmp_path_factory.mktemp("whole"))
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folder_is_refused(name, whole, tmp_path):
    damage, said = DAMAGES[name]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(ValueError) as error:
        Decoder.from_pretrained(tmp_path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not name.startswith("file") or str(tmp_path / WEIGHTS) in str(error.value)


def test_shards_behind_links_are_read(tmp_path):
    """A cache of downloads has links to its files, and old indexes name constants."""
    model = make("llama")
    model.save_pretrained(tmp_path / "blobs", 3000)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "folder" / path.name).symlink_to(path)
    path = tmp_path / "blobs" / INDEX
    index = json.loads(path.read_text())
    constant = "model.layers.0.self_attn.rotary_emb.inv_freq"
    index["weight_map"][constant] = index["weight_map"][FIRST]
    path.write_text(json.dumps(index))
    again = state_of(Decoder.from_pretrained(tmp_path / "folder"))
    for path, x in state_of(model).items():
        np.testing.assert_array_equal(again[path], x, err_msg=path)


def test_older_names_and_constants_are_read(tmp_path):
    """GPT-2's first files have no prefix, and causal masks beside the parameters."""
    model = make("gpt2")
    model.save_pretrained(tmp_path)

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), bool)

    rewritten(tmp_path, change)
    again = state_of(Decoder.from_pretrained(tmp_path))
    for path, x in state_of(model).items():
        np.testing.assert_array_equal(again[path], x, err_msg=path)


def test_equal_head_of_a_tied_model_is_read(tmp_path):
    make("qwen2").save_pretrained(tmp_path)
    rewritten(tmp_path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"]}))
    assert Decoder.from_pretrained(tmp_path).head is None


def test_folder_with_weights_is_not_overwritten(tmp_path):
    make("llama").save_pretrained(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="must have no weights, or be new; got"):
        make("llama", seed=1).save_pretrained(tmp_path)
    assert files_of(tmp_path) == before


def test_model_without_a_file_is_not_saved(tmp_path):
    model = make("llama")
    object.__setattr__(model.config, "source", None)
    with pytest.raises(ValueError, match=r"`config` must come from a config.json"):
        model.save_pretrained(tmp_path)


def test_projections_of_gpt2_are_one_matrix(tmp_path):
    model = make("gpt2")
    model.save_pretrained(tmp_path)
    tensors = checkpoint.open_file(tmp_path / "model.safetensors")
    x = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    maps = [getattr(model.layers[0].attention, name) for name in ("query", "key", "value")]
    parts = [linear(x).reshape(5, -1) for linear in maps]
    fused = x @ tensors["transformer.h.0.attn.c_attn.weight"]
    fused += tensors["transformer.h.0.attn.c_attn.bias"]
    np.testing.assert_allclose(fused, np.concatenate(parts, -1), atol=1e-5)


# ------------------------------------------------------------------------------------ eight devices


def main(folder, sizes):
    """Load onto a mesh: each device holds its part, and logits and gradients are one device's."""
    one = Decoder.from_pretrained(folder)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (4, 8)))

    def loss(params, graphdef, tokens):
        return jnp.mean(nnx.merge(graphdef, params)(tokens) ** 2)

    graphdef, params = nnx.split(one)
    whole, gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, graphdef, tokens)
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)
    model = Decoder.from_pretrained(folder, layout=Layout(mesh))
    up = model.layers[0].mlp.up.weight[...].addressable_shards[0].data
    assert up.shape == (model.config.hidden // sizes[3], 16 // sizes[1])
    for path, x in state_of(one).items():
        np.testing.assert_array_equal(state_of(model)[path], x, err_msg=path)
    graphdef, params = nnx.split(model)
    ours = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, graphdef, tokens)
    np.testing.assert_allclose(ours[0], whole, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours[1], gradient)
    new = Decoder(one.config, rngs=nnx.Rngs(0), layout=Layout(mesh))
    for path, x in state_of(new).items():
        assert x.sharding == state_of(model)[path].sharding
    prompts = [[1, 2, 3], [4]]
    texts = [list(Generation(x, prompts, 9, Sampling(temperature=0))) for x in (one, model)]
    assert texts[0] == texts[1]
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    with pytest.raises(ValueError, match=r"`layout` must divide .* evenly"):
        Decoder.from_pretrained(f"{folder}-odd", layout=Layout(mesh))


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (1, 4, 2, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loaded_onto_eight_devices(family, sizes, tmp_path):
    make(family, implementation=None).save_pretrained(tmp_path / "a")
    odd = {"n_embd": 12} if family == "gpt2" else {"hidden_size": 12, "head_dim": 4}
    make(family, **odd).save_pretrained(tmp_path / "a-odd")
    eight_devices.run(__name__, "main", str(tmp_path / "a"), sizes)
