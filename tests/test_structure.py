"""The shape of the repository: imports go one way, and what users read is there and true."""

import ast
import dataclasses
import graphlib
import inspect
import pathlib
import re

import jax
import pytest

import pallas_flash
import pallas_flash.flax
from pallas_flash._mask_objects import Joinable

ROOT = pathlib.Path(__file__).parents[1]

# ------------------------------------------------------------------------------------------------
# Imports.

# What each module of the package may import of the package. A new module needs a line here.
KERNEL = {"_masks", "_visits", "_problem", "_tiling.sizes", "_dropout", "_triton.common"}
MOSAIC = {"_masks", "_problem", "_mosaic.common", "_mosaic.ptx", "_mosaic.tiles", "_mosaic.work"}
MOSAIC |= {"_mosaic.options", "_tiling.sizes"}
PTX = {"_compat", "_mosaic.ptx.layouts", "_mosaic.ptx.registers"}
MAY_IMPORT = {
    "": {
        "mosaic",
        "_api",
        "_mask_objects",
        "_order",
        "_plot",
        "_select",
        "_tiling.sizes",
        "_tiling.tune",
        "_vjp",
    },
    "mosaic": {"_tiling.sizes"},
    "tune": {"_tiling.tune", "_tiling.cache", "_tiling.sizes"},
    "_tiling.tune": {
        "_api",
        "_validate",
        "_select",
        "_vjp",
        "_tiling.cache",
        "_tiling.choose",
        "_tiling.sizes",
        "_problem",
    },
    "flax": {"flax._drop_in", "flax._layer", "flax._rope"},
    "flax._drop_in": {"_api", "_checks", "_mask_objects", "_masks", "flax._arrays"},
    "flax._layer": {"_api", "_checks", "_masks", "flax._arrays", "flax._cache", "flax._rope"},
    "flax._cache": {"_checks"},
    "flax._rope": {"flax._arrays"},
    "flax._arrays": {"_checks", "_context.parts", "_mask_objects", "_masks", "_validate"},
    "_plot": {"_validate", "_checks", "_mask_objects", "_masks"},
    "_api": {
        "_context",
        "_partition",
        "_peers",
        "_validate",
        "_select",
        "_tiling.cache",
        "_tiling.choose",
        "_tiling.sizes",
        "_vjp",
        "_reference",
        "_problem",
        "_masks",
    },
    "_tiling.choose": {
        "_select",
        "_tiling.cache",
        "_tiling.sizes",
        "_triton.tiles",
        "_mosaic.candidates",
        "_problem",
    },
    "_tiling.cache": {"_select", "_tiling.sizes", "_mask_objects", "_masks", "_problem", "_compat"},
    "_peers": {"_checks"},
    "_validate": {
        "_checks",
        "_context",
        "_partition",
        "_peers",
        "_mask_objects",
        "_masks",
        "_operands",
        "_scores",
        "_dropout",
        "_problem",
        "_symbolic",
    },
    "_faster": {"_mask_objects", "_masks", "_problem"},
    "_select": {
        "_compat",
        "_context",
        "_faster",
        "_hardware",
        "_operands",
        "_peers",
        "_problem",
        "_tiling.sizes",
    },
    "_context": {
        "_context.ring",
        "_context.gather",
        "_context.heads",
        "_context.choice",
        "_context.parts",
        "_partition",
        "_problem",
        "_scores",
    },
    "_context.ring": {"_context.parts", "_masks", "_partition", "_problem", "_scores"},
    "_context.gather": {"_context.parts", "_masks", "_partition", "_problem"},
    "_context.heads": {"_context.parts", "_partition", "_problem", "_scores"},
    "_context.choice": {"_context.cost", "_masks", "_problem"},
    "_context.cost": set(),
    "_context.parts": {"_partition", "_problem"},
    "_vjp": {
        "_context",
        "_one_device",
        "_partition",
        "_tangents",
        "_xla",
        "_mosaic",
        "_triton",
        "_tiling.sizes",
        "_problem",
        "_scores",
        "_compat",
    },
    "_one_device": {"_compat"},
    "_partition": {
        "_mask_objects",
        "_masks",
        "_problem",
        "_operands",
        "_scores",
        "_dropout",
        "_symbolic",
    },
    "_tangents": {
        "_context",
        "_partition",
        "_reference",
        "_masks",
        "_problem",
        "_operands",
        "_symbolic",
    },
    "_reference": {"_problem", "_operands", "_dropout"},
    "_xla": {
        "_xla_rows",
        "_masks",
        "_visits",
        "_problem",
        "_operands",
        "_scores",
        "_dropout",
        "_symbolic",
    },
    "_xla_rows": {"_masks", "_problem", "_operands", "_scores", "_dropout"},
    "_triton": {
        "_triton.forward",
        "_triton.decode",
        "_triton.delta",
        "_triton.backward_dkv",
        "_triton.backward_dq",
        "_triton.backward_dbias",
        "_triton.common",
        "_tiling.sizes",
        "_scores",
        "_problem",
    },
    "_triton.forward": KERNEL | {"_scores"},
    "_triton.decode": KERNEL | {"_triton.forward", "_compat"},
    "_triton.delta": KERNEL,
    "_triton.backward_dkv": KERNEL | {"_triton.tiles.rule"},
    "_triton.backward_dq": KERNEL,
    "_triton.backward_dbias": KERNEL,
    "_triton.common": {
        "_compat",
        "_masks",
        "_visits",
        "_problem",
        "_operands",
        "_scores",
        "_dropout",
        "_tiling.sizes",
    },
    # Of tiles a backend has three modules, and no kernel.
    "_triton.tiles": {"_triton.tiles.rule", "_triton.tiles.candidates", "_tiling.workload"},
    "_triton.tiles.candidates": {"_problem", "_tiling.sizes"},
    "_triton.tiles.rule": {
        "_triton.tiles.table",
        "_tiling.workload",
        "_tiling.sizes",
        "_hardware",
    },
    "_triton.tiles.table": {"_tiling.sizes"},
    "_mosaic": {
        "_dropout",
        "_mosaic.forward",
        "_mosaic.decode",
        "_mosaic.backward",
        "_mosaic.backward_dbias",
        "_mosaic.backward_delta",
        "_mosaic.backward_dq",
        "_mosaic.tiles",
        "_masks",
        "_problem",
        "_scores",
        "_tiling.sizes",
    },
    "_mosaic.forward": MOSAIC | {"_dropout", "_mosaic.forward_common", "_mosaic.pairs", "_scores"},
    "_mosaic.decode": MOSAIC | {"_dropout", "_mosaic.forward_common", "_scores"},
    "_mosaic.forward_common": {"_mosaic.common", "_mosaic.ptx", "_mosaic.work", "_scores"},
    "_mosaic.backward": MOSAIC
    | {"_dropout", "_mosaic.backward_common", "_mosaic.backward_rows", "_mosaic.pairs", "_scores"},
    "_mosaic.backward_dbias": MOSAIC
    | {"_dropout", "_mosaic.backward_common", "_operands", "_scores"},
    "_mosaic.backward_dq": MOSAIC | {"_dropout", "_mosaic.backward_common", "_scores"},
    "_mosaic.backward_common": MOSAIC - {"_mosaic.tiles"}
    | {"_dropout", "_mosaic.pairs", "_scores"},
    "_mosaic.pairs": MOSAIC,
    "_mosaic.backward_delta": {"_mosaic.common", "_mosaic.ptx"},
    "_mosaic.backward_rows": {"_mosaic.common", "_mosaic.ptx"},
    "_mosaic.common": {"_compat", "_masks", "_mosaic.options", "_mosaic.ptx"},
    "_mosaic.options": {
        "_compat",
        "_dropout",
        "_masks",
        "_mosaic.ptx",
        "_operands",
        "_problem",
        "_scores",
    },
    "_mosaic.work": {"_masks", "_visits", "_mosaic.common", "_mosaic.ptx", "_problem"},
    "_mosaic.ptx": {f"_mosaic.ptx.{x}" for x in ("layouts", "products", "memory", "arithmetic")},
    "_mosaic.ptx.layouts": {"_compat"},
    "_mosaic.ptx.registers": {"_compat", "_mosaic.ptx.layouts"},
    "_mosaic.ptx.products": PTX,
    "_mosaic.ptx.memory": PTX,
    "_mosaic.ptx.arithmetic": PTX,
    "_mosaic.tiles": {
        "_hardware",
        "_mask_objects",
        "_mosaic.work",
        "_problem",
        "_tiling.sizes",
    },
    "_mosaic.candidates": {
        "_mosaic.tiles",
        "_mosaic.forward",
        "_mosaic.backward",
        "_mosaic.backward_dq",
        "_problem",
        "_tiling.sizes",
        "_hardware",
    },
    "_tiling.workload": {"_tiling.sizes", "_problem"},
    "_problem": {"_masks", "_operands", "_scores", "_dropout", "_symbolic", "_tiling.sizes"},
    "_mask_objects": {"_checks", "_masks", "_operands"},
    "_order": {"_checks"},
    "_checks": {"_operands"},
    "_scores": {"_operands"},
    "_operands": {"_symbolic"},
    "_dropout": set(),
    "_tiling": set(),
    "_tiling.sizes": set(),
    "_hardware": set(),
    "_masks": {"_operands", "_symbolic"},
    "_symbolic": set(),
    "_visits": set(),
    "_compat": set(),
}


def sources(folder):
    """The modules of a folder by dotted name; a package has that of its folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = {
    name: path
    for folder in ("pallas_flash", "models", "scripts", "tests")
    for name, path in sources(folder)
}


def imported(path):
    """What a file imports, wherever in it: modules, or `module.name` where that is no module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name):
    """The longest beginning of a dotted name that is a module of this repository, or None."""
    parts = name.split(".")
    beginnings = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((x for x in beginnings if x in MODULES), None)


def inside(name):
    """The name of a module of the package, without the package's own."""
    return name.removeprefix("pallas_flash").removeprefix(".")


PACKAGE = [name for name in MODULES if name.split(".")[0] == "pallas_flash"]


def test_the_order_is_one_way_and_complete():
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()
    assert sorted(map(inside, PACKAGE)) == sorted(MAY_IMPORT)


@pytest.mark.parametrize("module", PACKAGE)
def test_a_module_imports_only_what_is_below_it(module):
    ours = {module_of(name) for name in imported(MODULES[module])} - {None}
    back = {name for name in ours if inside(name) not in MAY_IMPORT[inside(module)]}
    assert not back


@pytest.mark.parametrize("module", PACKAGE)
def test_names_that_move_between_versions_of_jax_are_imported_in_one_place(module):
    inner = re.compile(r"jax\._src|jax\.experimental\.mosaic\.gpu\.(?!profiler)[a-z]")
    private = [name for name in imported(MODULES[module]) if inner.match(name)]
    assert not private or module == "pallas_flash._compat"


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.split(".")[0] in ("models", "scripts")]
)
def test_models_and_scripts_use_what_is_public(module):
    names = list(imported(MODULES[module]))
    tree = ast.parse(MODULES[module].read_text())
    names += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    ours = [name for name in names if name.split(".")[0] == "pallas_flash"]
    assert not [name for name in ours if re.search(r"\._[^_]", name)]
    assert not [name for name in names if module_of(name) and name.startswith("tests.")]
    if module.startswith("models"):
        assert not [name for name in names if name.split(".")[0] == "scripts"]
        assert not [name for name in names if "dot_product_attention" in name]


# ------------------------------------------------------------------------------------------------
# The public call.

# What `attention` has beyond `jax.nn.dot_product_attention`.
OWN = {
    "segment_ids",
    "query_offset",
    "query_positions",
    "key_value_positions",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
    "score_fn",
    "score_operands",
    "dropout_rate",
    "dropout_key",
    "broadcast_dropout",
    "precision",
    "return_lse",
    "tile_sizes",
    "reproducible",
    "sequence_axis",
    "context_parallelism",
}


def parameters(function):
    """(kind, default) of each parameter, by name."""
    return {p.name: (p.kind, p.default) for p in inspect.signature(function).parameters.values()}


def test_attention_takes_what_jax_takes():
    ours, theirs = parameters(pallas_flash.attention), parameters(jax.nn.dot_product_attention)
    assert list(ours)[:5] == list(theirs)[:5] == ["query", "key", "value", "bias", "mask"]
    assert {name: p for name, p in ours.items() if name not in OWN} == theirs
    assert {kind for name, (kind, _) in ours.items() if name in OWN} == {
        inspect.Parameter.KEYWORD_ONLY
    }


def test_explain_takes_what_attention_takes():
    assert parameters(pallas_flash.explain) == parameters(pallas_flash.attention)


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (pallas_flash, pallas_flash.flax, pallas_flash.mosaic)
    for name in getattr(module, "__all__", dir(module))
    if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name):
    thing = PUBLIC[name]
    # `Leaf` and `Joinable` say what the methods of mask objects do.
    methods = [
        x
        for key, x in vars(thing).items()
        if inspect.isclass(thing) and not key.startswith("_") and key not in dir(Joinable)
    ]
    for x in [thing, *filter(callable, methods)]:
        # A dataclass without one is given its signature.
        assert x.__doc__
        assert not x.__doc__.startswith(f"{x.__name__}(")


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_explain_every_parameter(name):
    thing = PUBLIC[name]
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
    elif thing is pallas_flash.explain:
        assert "arguments of `attention`" in thing.__doc__
        return
    else:
        names = [name for name in parameters(thing) if name not in ("self", "args", "kwargs")]
    entries = re.findall(r"^\s+\*{0,2}(\w[\w, ]*?)(?: \([^)]*\))?: ", inspect.getdoc(thing), re.M)
    documented = {name for entry in entries for name in entry.split(", ")}
    assert not set(names) - documented


# ------------------------------------------------------------------------------------------------
# Documents.

FOLDERS = "pallas_flash|models|scripts|tests|docs|.ci".replace(".", r"\.")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "pyproject.toml"]
MENTIONS = [*DOCUMENTS, *MODULES.values()]


@pytest.mark.parametrize("path", MENTIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_are_mentioned_exist(path):
    text = path.read_text()
    # Code has other words with a slash; there only names of files are paths.
    ending = r"\w" if path in DOCUMENTS else r"\.(?:py|md|toml|sh|txt)\b"
    names = re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*{ending}", text)
    if path.suffix == ".md":
        links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
        names += [str((path.parent / link).relative_to(ROOT)) for link in links]
    assert not [name for name in names if not (ROOT / name).exists()]
