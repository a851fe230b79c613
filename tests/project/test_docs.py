"""The code of the documents runs: blocks, examples in docstrings, and the numbers of a page.

A `python` block prints what stands right below it, a `text` block or a table. The blocks of a page
share one namespace, except those of a recipe.
"""

import contextlib
import dataclasses
import doctest
import functools
import importlib
import io
import pkgutil
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from support import cases, oracle, ttir
from support.described_gpus import described_gpu
from support.repository import PUBLIC, ROOT, assert_none, read

import pallas_flash
from pallas_flash import __main__
from pallas_flash._backends.triton import backward_dkv
from pallas_flash._call import tune
from pallas_flash._execution import tile_choice
from pallas_flash._jax import compat
from pallas_flash._problem.blocks import Tiling
from pallas_flash._problem.features import features_of
from pallas_flash._problem.masks import Band, Mask
from pallas_flash._problem.tile_sizes import selected
from pallas_flash._selection import tuned
from pallas_flash.tuning import Tile, TileSizes

matplotlib.use("Agg")
README, ALGORITHM = ROOT / "README.md", ROOT / "docs" / "algorithm.md"
MASKS = ROOT / "docs" / "masks-and-scores.md"
# Each block of these pages can be copied alone.
RECIPES = [*ROOT.glob("docs/recipes/*.md")]
# Nobody edits the notes, so nothing holds them to the code.
PAGES = [README, *sorted({*ROOT.glob("docs/**/*.md")} - {*ROOT.glob("docs/notes/*.md")})]

# The source, which may be folded away, then what it prints: a block or a table.
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n+(?:</details>\n+)?(?:```text\n(.*?)^```\n|((?:\|[^\n]*\n)+))?",
    re.M | re.S,
)
# Such a block needs another package: tests/interop runs it.
FOREIGN = '```python title="pip install '


@functools.cache
def run(page):
    """The namespace after all blocks of a page; what each printed, and what stands below it.

    Pictures that the blocks save are under "pictures" in the namespace, by name.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        namespace, printed = _run(page)
        pictures = {path.name: plt.imread(path) for path in Path().glob("*.png")}
    return namespace | {"pictures": pictures}, printed


def _run(page):
    text, namespace, printed = read(page), {"__name__": page.name}, []
    for block in BLOCK.finditer(text):
        if page in RECIPES:
            namespace = {"__name__": page.name}
        source, *shown = block.groups()
        # So that a traceback names the line of the page.
        lines = "\n" * text.count("\n", 0, block.start(1))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(lines + source, str(page), "exec"), namespace)
        printed.append((out.getvalue(), next(filter(None, shown), None)))
    assert len(printed) == text.count("```python") - text.count(FOREIGN)
    return namespace, printed


# These pages have the code that takes longest, and other tests cover it, too.
LONG = (
    "masks-and-scores.md",
    "flax.md",
    "decoding.md",
    "migration.md",
    "models.md",
    "serving.md",
    "variants.md",
)
QUICK = [page for page in PAGES if page.name not in LONG]


@pytest.mark.parametrize("page", cases.default(QUICK, PAGES), ids=lambda page: page.name)
def test_code_runs_and_prints_what_is_shown(page):
    for printed, shown in run(page)[1]:
        if shown is not None or (printed and page != README):
            lines = [line.rstrip() for line in printed.strip().splitlines()]
            assert "\n".join(lines) == (shown or "").strip(), f"It prints\n\n{printed}"


def test_explain_prints_what_the_first_page_shows():
    """On a GPU, which is described here."""
    if not compat.has_mosaic_gpu():
        pytest.skip("JAX is too old for the tiles of the kernels for Hopper")
    page = run(README)[0]
    (shown,) = re.findall(r"^```text\n(.*?)^```", read(README), re.M | re.S)
    with described_gpu("NVIDIA H200"):
        told = pallas_flash.explain(*(page[name] for name in "qkv"), is_causal=True)
    assert f"{told}\n" == shown


def test_first_pages_list_the_same_gpus():
    """The README is not on the site, and the site's first page is not in an sdist's description."""
    tables = [
        re.findall(r"^\|.*Triton.*$", read(page), re.M)
        for page in (README, ROOT / "docs" / "index.md")
    ]
    assert tables[0] == tables[1] != []


def headings(page):
    """Their anchors, as repositories and the site make them."""
    text = re.sub(r"^(```+).*?^\1", "", read(page), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_headings():
    """That they lead to files is a test of the structure."""
    links = [
        (page, (page.parent / path).resolve() if path else page, anchor)
        for page in PAGES
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", read(page))
    ]
    known = {target: headings(target) for _, target, _ in links}
    # The site has an anchor for each name.
    known[ROOT / "docs" / "reference.md"] |= set(documented())
    assert_none(f"{x.name}: {y}#{anchor}" for x, y, anchor in links if anchor not in known[y])


def documented():
    """The names whose docstrings the reference shows."""
    text = read(ROOT / "docs" / "reference.md")
    return re.findall(r"^::: (\S+)$", text, re.M)


def test_the_reference_has_all_that_is_public():
    assert sorted(documented()) == sorted(PUBLIC)


def test_the_reference_links_every_entry():
    text = read(ROOT / "docs" / "reference.md")
    linked = set(re.findall(r"\]\(#(pallas_flash\.\S+)\)", text))
    assert linked == {x for x in documented() if ".tuning." not in x} | {"pallas_flash.tuning.tune"}


def test_the_site_shows_every_page():
    shown = re.findall(r": ([\w/-]+\.md)$", read(ROOT / "mkdocs.yml"), re.M)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path != README]
    assert sorted(shown) == sorted(pages)


EXAMPLES = [
    example
    for module in pkgutil.walk_packages(pallas_flash.__path__, "pallas_flash.")
    if compat.has_mosaic_gpu() or "._backends.mosaic" not in module.name
    for example in doctest.DocTestFinder(exclude_empty=True).find(
        importlib.import_module(module.name)
    )
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_in_docstrings(example):
    report = []
    result = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert result.attempted and not result.failed, "".join(report)


def test_public_functions_have_an_example():
    names = {example.name.rsplit(".", 1)[-1] for example in EXAMPLES}
    assert {"attention", "explain", "plot", "attention_fn", "SelfAttention"} <= names


def test_show_prints_what_the_page_about_tuning_shows(monkeypatch, tmp_path, capsys):
    """Winners are the table's tiles. JAX and the kernels change, and calls stay the same."""
    if not compat.has_mosaic_gpu():
        pytest.skip("JAX is too old for the tiles of the kernels for Hopper")
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(tmp_path / "tiles.json"))
    x = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    with described_gpu("NVIDIA H200"):
        problem = tune._problem((x, x, x), {"is_causal": True})
        winner = selected(
            tile_choice.tiles_of_call(problem, "mosaic", None), ("forward", "backward")
        )
        tuned.store(features_of(problem), "NVIDIA H200", winner)
    monkeypatch.setattr(sys, "argv", ["pallas_flash", "tune", "--show"])
    assert __main__.main() == 0
    page = read(ROOT / "docs" / "tuning.md")
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    printed = re.sub(
        r"jax [\d.]+, kernels \w+", "jax 0.11.2, kernels 0a1b2c3d", capsys.readouterr().out
    )
    assert printed == shown


# ------------------------------------------------------------------------------------------------
# Pages that draw
# ------------------------------------------------------------------------------------------------


DRAWING = [MASKS, ROOT / "docs" / "scaling.md"]


def pictures_of(page):
    return re.findall(r"\]\(images/(.*?)\)", read(page))


@pytest.mark.parametrize(
    "page",
    cases.default([page for page in DRAWING if page in QUICK], DRAWING),
    ids=lambda page: page.name,
)
def test_pictures_are_those_that_the_page_draws(page):
    drawn = run(page)[0]["pictures"]
    linked = pictures_of(page)
    assert sorted(linked) == sorted(drawn)
    for name in linked:
        path = page.parent / "images" / name
        assert path.stat().st_size < 40_000
        here, shown = drawn[name], plt.imread(path)
        assert here.shape == shown.shape
        # Within the axes, where no font is: its colours differ by more than 0.2.
        inside = tuple(slice(n // 5, n - n // 5) for n in here.shape[:2])
        assert np.abs(here[inside] - shown[inside]).max() < 0.1


def test_every_picture_is_drawn_by_a_page():
    linked = [name for page in DRAWING for name in pictures_of(page)]
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs" / "images").iterdir())


# ------------------------------------------------------------------------------------------------
# docs/algorithm.md
# ------------------------------------------------------------------------------------------------


def test_functions_that_are_pointed_at_exist():
    links = re.findall(r"\[`(\w+)`\]\((\.\./pallas_flash/[\w/]+\.py)\)", read(ALGORITHM))
    assert len(links) >= 15
    assert_none(
        f"{path}: {name}"
        for name, path in links
        if not re.search(rf"^\s*(?:def|class) {name}\b", read(ALGORITHM.parent / path), re.M)
    )


def problem(T=37, S=53, N=1, K=1, H=16, V=10, seed=0):
    """q, k, v, do and dlse in float64, with the axes of `attention`."""
    shapes = (1, T, N, H), (1, S, K, H), (1, S, K, V), (1, T, N, V), (1, T, N)
    return [np.random.default_rng(seed).normal(size=shape) for shape in shapes]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_every_step_computes_attention():
    """On another problem than the page's, with T, S, H and V all different, in ragged tiles."""
    page = run(ALGORITHM)[0]
    arrays = problem()
    truth = {
        name: x[0].squeeze(1)
        for name, x in oracle.solve(*arrays, scale=page["scale"]).values.items()
        if name in oracle.NAMES
    }
    q, k, v, do, dlse = (x[0].squeeze(1) for x in arrays)
    o_lse = page["safe"](q, k, v)
    for o, lse in (o_lse, page["flash_2"](q, k, v, 16, 8)):
        close(o, truth["o"])
        close(lse, truth["lse"])
    everything = np.ones((len(q), len(k)), bool)
    o, lse_log2 = page["forward"](q, k, v, everything, 16, 8)
    close(o, truth["o"])
    close(lse_log2 * np.log(2), truth["lse"])

    o, lse = o_lse
    rows = (do, lse, page["delta_of"](o, do, dlse))
    dk, dv = page["dkv_pass"]([(q, *rows)], k, v, 16, 8)
    dq = page["dq_pass"](q, k, v, *rows, 16, 8)
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        close(gradient, truth[name])


@pytest.mark.parametrize(
    "options", [{"is_causal": True, "query_offset": -5}, {"local_window_size": (9, 2)}], ids=str
)
def test_the_masked_step_computes_attention(options):
    """The first queries, or the last, see nothing; others nothing in the first tiles they meet."""
    page = run(ALGORITHM)[0]
    arrays = problem(T=70)
    truth = oracle.solve(*arrays, scale=page["scale"], **options).values
    visible = oracle.visible((1, 1, 70, 53), **options)[0, 0]
    assert not visible.any(axis=1).all()
    q, k, v, *_ = (x[0].squeeze(1) for x in arrays)
    o, lse_log2 = page["forward"](q, k, v, visible, 8, 16)
    close(o, truth["o"][0].squeeze(1))
    close(lse_log2 * np.log(2), truth["lse"][0].squeeze(1))


def test_grouped_heads():
    page = run(ALGORITHM)[0]
    arrays = problem(N=3)
    truth = oracle.solve(*arrays, scale=page["scale"]).values
    q, k, v, do, dlse = (x[0] for x in arrays)
    heads = []
    for g in range(3):
        o, lse = page["safe"](q[:, g], k[:, 0], v[:, 0])
        heads.append((q[:, g], do[:, g], lse, page["delta_of"](o, do[:, g], dlse[:, g])))
    dk, dv = page["dkv_pass"](heads, k[:, 0], v[:, 0], 16, 8)
    close(dk, truth["dk"][0, :, 0])
    close(dv, truth["dv"][0, :, 0])


def test_the_drawn_mask_is_the_kernels():
    allowed, side = run(ALGORITHM)[0]["allowed"], Tiling(8, 2)
    mask = Mask((Band(low=-5, high=0),))
    at = np.arange(8)
    np.testing.assert_array_equal(mask.allowed(0, 0, at[:, None], at), allowed)
    # The four numbers that the page gives for the last row of tiles.
    assert mask.kv_ranges(side, side)[0, -1].tolist() == [0, 1, 3, 4]
    assert "in the last row 0, 1, 3, 4." in read(ALGORITHM)


# ------------------------------------------------------------------------------------------------
# What the kernels move


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A problem, by the letters of `attention`."""

    T: int
    S: int
    B: int = 1
    N: int = 1
    K: int = 1
    H: int = 64
    V: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False
    with_lse: bool = False


def call(tiles, p):
    """Forward and backward of a problem, and its arguments."""
    attention = functools.partial(
        pallas_flash.attention,
        implementation="triton",
        config=tiles,
        is_causal=p.is_causal,
        return_lse=p.with_lse,
    )

    def gradients(q, k, v, do):
        dlse = jnp.ones((p.B, p.T, p.N))
        return jax.vjp(attention, q, k, v)[1]((do, dlse) if p.with_lse else do)

    shapes = (p.B, p.T, p.N, p.H), (p.B, p.S, p.K, p.H), (p.B, p.S, p.K, p.V), (p.B, p.T, p.N, p.V)
    return gradients, *(jnp.ones(shape, p.dtype) for shape in shapes)


def counted(tiles, p):
    """Bytes loaded and stored by each kernel of forward and backward: active lanes of the IR."""
    runs = []
    ttir.evaluate(*call(tiles, p), runs=runs)
    return {run.kernel.name.removeprefix("pallas_flash_"): bytes_moved(run) for run in runs}


def bytes_moved(run):
    loads = zip(run.loads, run.kernel.operands, strict=True)
    stores = zip(run.stores, run.kernel.results, strict=True)
    return sum(n * x.dtype.itemsize for n, x in loads) + sum(
        int(n.sum()) * x.dtype.itemsize for n, x in stores
    )


def forward_bytes(T, rows, H, V, programs, size):
    """The formula of the page; `rows` are those that stream past all programs of a head."""
    return size * (T + rows) * (H + V) + 4 * (T + programs)


def delta_bytes(T, V, size):
    return size * 2 * T * V + 4 * T


def dkv_bytes(S, rows, H, V, programs, size):
    return size * (2 * S + rows) * (H + V) + 4 * (2 * rows + programs)


def dq_bytes(T, rows, H, V, programs, size):
    return size * (T * (2 * H + V) + rows * (H + V)) + 4 * (2 * T + programs)


def by_formula(tiles, p):
    """The same by formulas."""
    size = jnp.dtype(p.dtype).itemsize

    def flow(length, block, other, other_block, heads=1):
        """Programs of one head, rows that flow past all of them, and the bytes of tile numbers."""
        programs = -(-length // block)
        rows = heads * other * programs
        if p.is_causal:  # Whole tiles, those on the diagonal too; key tiles see it from the end.
            last = block * np.arange(1, programs + 1)
            rows = heads * int(np.sum(-(-last // other_block) * other_block))
        return programs, rows, 16 * programs if p.is_causal or other % other_block else 0

    programs, rows, more = flow(p.T, tiles.forward.block_q, p.S, tiles.forward.block_kv)
    forward = forward_bytes(p.T, rows, p.H, p.V, programs, size) + more
    programs, rows, more = flow(p.T, tiles.dq.block_q, p.S, tiles.dq.block_kv)
    dq = dq_bytes(p.T, rows, p.H, p.V, programs, size) + more
    programs, rows, more = flow(p.S, tiles.dkv.block_kv, p.T, tiles.dkv.block_q, p.N // p.K)
    dkv = dkv_bytes(p.S, rows, p.H, p.V, programs, size) + more
    delta = delta_bytes(p.T, p.V, size) + (4 * p.T if p.with_lse else 0)
    by_head = {"forward": p.N * forward, "delta": p.N * delta, "dkv": p.K * dkv, "dq": p.N * dq}
    return {name: p.B * n for name, n in by_head.items()}


# Different in each kernel and on each side; and one of three lengths.
SMALL = TileSizes(forward=Tile(64, 32), dkv=Tile(16, 64), dq=Tile(32, 16))
TABLE = TileSizes(forward=Tile(64, 32), dkv=Tile(32, 64), dq=Tile(64, 32))
# Tiles that flow past query tiles reach beyond what these see.
WIDE = TileSizes(forward=Tile(16, 64), dkv=Tile(16, 64), dq=Tile(16, 64))


MOVED = [
    (TABLE, Sizes(128, 128)),
    (SMALL, Sizes(128, 192, H=24, V=40, dtype="float32")),
    (SMALL, Sizes(150, 90, H=16, V=16, with_lse=True)),
    (SMALL, Sizes(128, 128, N=4, K=2, H=16, V=16, is_causal=True)),
    (WIDE, Sizes(128, 128, H=16, V=16, is_causal=True)),
    *((TABLE, Sizes(T, T)) for T in (256, 512)),
    (SMALL, Sizes(192, 128, H=32, V=16)),
    (SMALL, Sizes(64, 128, B=2, N=6, K=2, H=16, V=16)),
    (SMALL, Sizes(150, 128, H=16, V=16)),
    (SMALL, Sizes(128, 90, H=16, V=16)),
    *((SMALL, Sizes(T, T, H=16, V=16, is_causal=True)) for T in (64, 128, 256)),
]


@pytest.mark.parametrize(("tiles", "sizes"), cases.default(MOVED[:5], MOVED))
def test_kernels_move_what_the_page_says(tiles, sizes, kernel_case, monkeypatch):
    """One program has all heads of a group, because so few keys would split them."""
    monkeypatch.setattr(backward_dkv, "splits_of_heads", lambda *_: 1)
    assert counted(tiles, sizes) == by_formula(tiles, sizes)
