"""Documents show what docs/results says, and each of its lines has one schema."""

import pytest

from scripts import make_tables
from scripts.benchmark import results
from scripts.command import UserError


def test_documents_agree_with_results():
    """After a measurement or an edit: python scripts/make_tables.py."""
    stale = *make_tables.stale(), *make_tables.stale_figures()
    changed = [str(path.relative_to(make_tables.ROOT)) for path, _ in stale]
    assert not changed


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("<!-- table: wish -->\n<!-- end -->\n", "there is no table 'wish'"),
        ("<!-- table: choice -->\n", "each marker must have its end"),
        ("<!-- table: choice -->\n<!-- table: choice -->\n<!-- end -->\n", "each marker must have"),
        ("ours <!--n:h200 forward dense jax_cudnn worst-->1", "each marker must have its end"),
        ("ours <!--n:h200 forward dense nobody worst-->1<!--/n-->", "there is no number"),
        ("ours <!--n:h200 forward dense jax_cudnn luck-->1<!--/n-->", "there is no number"),
        ("ours <!--n:h200 dense worst-->1<!--/n-->", "there is no number"),
        ("<!--n:h200 forward dense jax_cudnn worst-->1<!--/n-->", "must not begin a line"),
    ],
)
def test_a_marker_that_says_nothing_is_an_error(tmp_path, text, wrong):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(UserError, match=wrong):
        make_tables.filled(path, set())


def test_table_that_no_document_shows_is_an_error(monkeypatch):
    monkeypatch.setitem(make_tables.TABLES, "unused", lambda: "")
    with pytest.raises(UserError, match=r"none shows \['unused'\]"):
        list(make_tables.stale())


LINE = make_tables.records("h200-training")[0]


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ("device", "versions", "pass", "implementation", "config")),
        *({name: 0} for name in "BTSNKD"),
        dict(versions={}),
        dict(clocks="fast"),
        dict(red={}),
        dict(ms=1.0),
        dict(ms={"median": 1.0, "min": 1.0}),
        dict(ms={"median": 1.0, "min": 2.0, "n": 3}),
        dict(ms={"median": None, "min": None, "n": 3}),
        dict(ms={"median": float("nan"), "min": 1.0, "n": 3}),
        dict(tflops=float("inf")),
    ],
    ids=str,
)
def test_a_line_of_another_schema_is_refused(change):
    assert results.problem(LINE) is None
    assert results.problem(LINE | change)
    with pytest.raises(ValueError, match=r"`|number"):
        results.dump(LINE | change)
