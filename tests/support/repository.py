"""The files of the repository, what they import of each other, and what is public."""

import ast
import functools
import inspect
import pathlib

import pallas_flash
import pallas_flash.flax

ROOT = pathlib.Path(__file__).parents[2]


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


@functools.cache
def read(path):
    """The text of a file."""
    return path.read_text(encoding="utf-8")


@functools.cache
def nodes(path):
    """All nodes of a module's syntax tree, from the top."""
    return [*ast.walk(ast.parse(read(path)))]


def imported(path):
    """Yield the imports of a file: modules, or `module.name` where that is no module."""
    for node in nodes(path):
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


@functools.cache
def imports():
    """The modules of this repository that each module outside the tests imports."""
    return {
        module: {module_of(name) for name in imported(path)} - {None, module}
        for module, path in MODULES.items()
        if not module.startswith("tests")
    }


def assert_none(offenders):
    """Fail with a line for each of those that break a rule."""
    lines = [str(x) for x in offenders]
    assert not lines, "\n".join(["", *lines])


# The modules that are public.
SURFACE = (
    pallas_flash,
    pallas_flash.masks,
    pallas_flash.paged,
    pallas_flash.tuning,
    pallas_flash.flax,
)
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in SURFACE
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
}
