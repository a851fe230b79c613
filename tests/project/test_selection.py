"""The default run has every value of every parameter, and no more items than that takes."""

import itertools
import pathlib
import re
import types

import conftest
import pytest


class Item:
    """A test called with `values`, by one `parametrize` for each of `names`."""

    def __init__(self, names, values):
        self._names = names
        self.callspec = types.SimpleNamespace(params=dict(values))

    def iter_markers(self, _):
        return iter([pytest.mark.parametrize(names, []).mark for names in self._names])


def kept(names, rows):
    items = [Item(names, row) for row in rows]
    needless = conftest.needless(items)
    return [tuple(item.callspec.params.values()) for item in items if item not in needless]


def test_of_two_by_four_combinations_four_remain_with_all_six_values():
    rows = [dict(a=a, b=b) for a, b in itertools.product("xy", range(4))]
    found = kept(["a", "b"], rows)
    assert sorted(b for _, b in found) == [0, 1, 2, 3]
    assert sorted(a for a, _ in found) == ["x", "x", "y", "y"]


@pytest.mark.parametrize("names", ["a, b", ("a", "b")])
def test_a_row_of_a_table_is_one_value(names):
    rows = [dict(a=a, b=b) for a, b in [(1, 1), (1, 2), (2, 2), (2, 1)]]
    assert len(kept([names], rows)) == 4


def test_what_has_no_parameters_is_needed():
    assert kept([], [{}]) == [()]


def test_a_value_that_is_there_twice_is_one():
    x = object()
    assert len(kept(["a"], [dict(a=x), dict(a=x)])) == 1


def test_the_tests_of_a_case_stand_together():
    """In the order of the first of each, file by file."""

    def item(path, **params):
        return types.SimpleNamespace(path=path, callspec=types.SimpleNamespace(params=params))

    one, two, plain = object(), object(), types.SimpleNamespace(path="a")
    items = [item("a", case=one), plain, item("a", case=two), item("a", case=one, x=1)]
    other = item("b", case=one)
    assert conftest.by_case([*items, other]) == [items[0], items[3], plain, items[2], other]


@pytest.mark.parametrize("command", ["run", "nightly"])
def test_test_files_that_ci_names_exist(command):
    tests = pathlib.Path(__file__).parents[1]
    names = re.findall(r"\btest_[\w*]+", (tests.parent / ".ci" / command).read_text())
    assert names
    assert [name for name in names if not [*tests.glob(f"*/{name}.py")]] == []
