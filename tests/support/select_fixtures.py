"""Fixtures of the tests of the choice: no warning given yet, and a JAX without Triton."""

import contextlib
import sys

import pytest

from pallas_flash._jax import compat
from pallas_flash._selection import resolve


@pytest.fixture(autouse=True)
def no_warning_given_yet(monkeypatch):
    monkeypatch.setattr(resolve, "_warned", set())


@pytest.fixture(name="no_triton")
def without_triton(monkeypatch):
    """A JAX without `jax.experimental.pallas.triton`, whether or not it was imported before."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr("jax.experimental.pallas.triton")
    compat.triton.cache_clear()
    yield
    compat.triton.cache_clear()
