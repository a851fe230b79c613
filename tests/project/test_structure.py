"""The shape of the repository: imports go one way, and what users read is there and true."""

import ast
import dataclasses
import fnmatch
import graphlib
import inspect
import re
import typing

import jax
from support.repository import (
    MODULES,
    PUBLIC,
    ROOT,
    assert_none,
    imported,
    imports,
    inside,
    module_of,
    nodes,
    read,
)

import pallas_flash
import pallas_flash.flax
from pallas_flash._call import attention

# ------------------------------------------------------------------------------------------------
# Imports.

# From the top, a layer a line: a module may import modules of its own layer and of those below. The
# rooms of the package are layers.
LAYERS = """
scripts*
models*
__main__
__init__ masks paged tuning flax*
_call*
_selection*
_arguments*
_autodiff*
_execution*
_backends*
_problem*
_jax*
"""
# Each is for itself: no backend imports another.
BACKENDS = tuple(f"_backends.{name}" for name in ("mosaic", "triton", "xla", "reference"))


def layer_of(module):
    """The number, from the top, of the one layer that names a module."""
    name = inside(module) or "__init__"
    [layer] = [
        n
        for n, patterns in enumerate(LAYERS.split("\n"))
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
    ]
    return layer


PACKAGE = [name for name in MODULES if name.split(".")[0] == "pallas_flash"]


def test_no_imports_form_a_circle():
    graphlib.TopologicalSorter(imports()).prepare()


def test_modules_import_from_their_layer_or_below():
    layers = {module: layer_of(module) for module in imports()}
    assert_none(
        f"{module} imports {name}"
        for module, names in imports().items()
        for name in names
        if layers[name] < layers[module]
    )


def test_no_backend_imports_another():
    def backend(name):
        return next((x for x in BACKENDS if inside(name).startswith(x)), None)

    pairs = [(module, name) for module in PACKAGE for name in imports()[module]]
    of_backends = [(x, y) for x, y in pairs if backend(x) and backend(y)]
    assert_none(f"{x} imports {y}" for x, y in of_backends if backend(x) != backend(y))
    # Modules of a folder import each other, so that the rule is about something.
    assert {backend(x) for x, _ in of_backends} == {*BACKENDS} - {"_backends.reference"}
    assert {backend(y) for _, y in pairs} == {*BACKENDS, None}


def test_no_test_module_imports_another():
    """Shared code of tests is in tests/support."""
    assert_none(
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith("tests.")
        for name in imported(path)
        if name.startswith("test_")
    )


def test_one_module_of_the_tests_starts_processes():
    """The one that ties them to the process that starts them."""
    starting = [
        module
        for module, path in MODULES.items()
        if module.startswith("tests")
        and {"subprocess", "multiprocessing"} & {name.split(".")[0] for name in imported(path)}
    ]
    assert starting == ["tests.support.children"]


def test_names_that_move_between_versions_of_jax_are_imported_in_one_place():
    inner = re.compile(r"jax\._src|jax\.experimental\.mosaic\.gpu\.(?!profiler)[a-z]")
    importing = {x for x in PACKAGE if any(map(inner.match, imported(MODULES[x])))}
    assert importing == {"pallas_flash._jax.compat"}


def used_by(folder):
    """The names that modules of a folder import or take from a module, each with its module."""
    for module in [name for name in MODULES if name.split(".")[0] == folder]:
        path = MODULES[module]
        names = [ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)]
        yield from ((module, name) for name in [*imported(path), *names])


def test_models_and_scripts_use_what_is_public():
    offenders = []
    for folder, above in (("scripts", {"tests"}), ("models", {"tests", "scripts"})):
        used = list(used_by(folder))
        ours = [(x, name) for x, name in used if name.split(".")[0] == "pallas_flash"]
        assert ours
        offenders += [(x, name) for x, name in ours if re.search(r"\._[^_]", name)]
        theirs = [(x, name) for x, name in used if name.split(".")[0] in above]
        offenders += [(x, name) for x, name in theirs if module_of(name)]
        if folder == "models":
            offenders += [(x, name) for x, name in used if "dot_product_attention" in name]
    assert_none(f"{module} uses {name}" for module, name in offenders)


# ------------------------------------------------------------------------------------------------
# The public call.

# The arguments of `attention` that `jax.nn.dot_product_attention` has not.
OWN = {
    "segment_ids",
    "query_offset",
    "query_positions",
    "key_value_positions",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
    "score_mod",
    "dropout_rate",
    "dropout_key",
    "broadcast_dropout",
    "precision",
    "return_lse",
    "return_max_logits",
    "config",
    "reproducible",
    "batch_invariant",
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


def test_overloads_have_the_keywords_of_attention():
    def told(hints):
        # jaxtyping makes each type anew.
        return {name: str(hint) for name, hint in hints.items()}

    results = {"return_residual", "return_lse", "return_max_logits", "return"}
    spelt_out = {"query", "key", "value", "bias", "mask", *results}
    ours = told(typing.get_type_hints(inspect.unwrap(pallas_flash.attention)))
    options = told(typing.get_type_hints(attention.Options))
    assert options == {name: hint for name, hint in ours.items() if name not in spelt_out}
    assert options.keys() == ours.keys() - spelt_out


def without_docstring(thing):
    """Yield the names of a public thing and of its methods that have no docstring."""
    methods = [
        x for key, x in vars(thing).items() if inspect.isclass(thing) and not key.startswith("_")
    ]
    for x in [thing, *filter(callable, methods)]:
        # A dataclass without one is given its signature.
        if not x.__doc__ or x.__doc__.startswith(f"{x.__name__}("):
            yield x.__name__


def test_public_names_have_docstrings():
    assert_none(f"{name}: {x}" for name in PUBLIC for x in without_docstring(PUBLIC[name]))


def undocumented(thing):
    """Return the parameters that a docstring does not explain."""
    docstring = inspect.getdoc(thing) or ""
    if thing is pallas_flash.explain and "arguments of `attention`" in docstring:
        return []
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
    else:
        names = [name for name in parameters(thing) if name not in ("self", "args", "kwargs")]
    entries = re.findall(r"^\s+\*{0,2}(\w[\w, ]*?)(?: \([^)]*\))?: ", docstring, re.M)
    documented = {name for entry in entries for name in entry.split(", ")}
    return [name for name in names if name not in documented]


def test_docstrings_explain_every_parameter():
    assert_none(f"{name}: {x}" for name in PUBLIC for x in undocumented(PUBLIC[name]))


OURS = {name: path for name, path in MODULES.items() if not name.startswith("tests")}


def length(function):
    """The lines of a function without its docstring, which is its first statement."""
    first = function.body[min(ast.get_docstring(function) is not None, len(function.body) - 1)]
    head = function.body[0].lineno - function.lineno
    return head + function.end_lineno - first.lineno + 1


def test_functions_have_80_lines_at_most():
    assert_none(
        f"{name}.{node.name}: {length(node)} lines"
        for name, path in OURS.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and length(node) > 80
    )


# Calls that open a file of text, unless they name the mode of a binary one; and two that do not.
OPENING = r"open|.*\.(open|fdopen|read_text|write_text|NamedTemporaryFile|TextIOWrapper)"
OTHERS = {"os.open", "self._checkpoints.open"}


def without_encoding(path):
    """Yield the calls that read or write text in the encoding of the locale."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) not in OTHERS:
            names = {x.arg for x in node.keywords}
            binary = re.search("'[rwxa+]*b[rwxa+]*'", ast.unparse(node))
            opens = (re.fullmatch(OPENING, name) and not binary) or "text" in names
            if opens and "encoding" not in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_text_files_are_utf_8():
    """Of the package, models, scripts and pages; a user's locale may be another."""
    paths = [*OURS.values(), *(ROOT / "docs").glob("*.py")]
    assert_none(place for path in paths for place in without_encoding(path))


# ------------------------------------------------------------------------------------------------
# Documents.

FOLDERS = "pallas_flash|models|scripts|tests|docs|.ci".replace(".", r"\.")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "pyproject.toml"]
MENTIONS = [*DOCUMENTS, *MODULES.values()]


def paths_in(path):
    """Yield the paths that a file mentions."""
    # Code has other words with a slash; there only names of files are paths.
    ending = r"\w" if path in DOCUMENTS else r"\.(?:py|md|toml|sh|txt)\b"
    yield from re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*{ending}", read(path))
    if path.suffix == ".md":
        for link in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", read(path)):
            yield str((path.parent / link).relative_to(ROOT))


def test_paths_that_are_mentioned_exist():
    mentioned = [(str(x.relative_to(ROOT)), name) for x in MENTIONS for name in paths_in(x)]
    assert_none(f"{x}: {name}" for x, name in mentioned if not (ROOT / name).exists())
    # In documents and in code.
    assert {x.endswith(".md") for x, _ in mentioned} == {True, False}
