"""Fixtures of the tests of tuning: a file of winners, GPUs that seem to be here, a quick search."""

import pytest
from support.tune_cases import FAST, OTHER, gpu_here, table

from pallas_flash._call import tune
from pallas_flash._call.tune import Trial, Tuning
from pallas_flash._jax import compat
from pallas_flash._selection import tuned
from pallas_flash.tuning import TileSizes


@pytest.fixture(name="file", autouse=True)
def own_file(monkeypatch, tmp_path):
    """A file of winners for each test alone, which does not exist yet."""
    path = tmp_path / "folder" / "tiles.json"
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(path))
    for cached in (tuned.read, tuned._warn):
        cached.cache_clear()
    yield path
    tuned.read.cache_clear()


@pytest.fixture(name="h200")
def h200_here(monkeypatch):
    """A GPU that is here, as far as one can tell before a program is compiled."""
    gpu_here(monkeypatch, "NVIDIA H200")


@pytest.fixture(name="hopper")
def hopper_here(monkeypatch, h200):
    monkeypatch.setattr(compat, "has_mosaic_gpu", lambda: True)


@pytest.fixture(name="search")
def instant_search(monkeypatch):
    """`tuning.tune` finds these tiles at once."""
    asked, found = [], TileSizes(forward=FAST)

    def search(problem, passes, implementations):
        asked.append((problem, passes))
        trials = (Trial("forward", FAST, 1.0, None), Trial("forward", OTHER, None, "it burnt"))
        return Tuning(found, trials, {"triton": table()}, "a clock")

    monkeypatch.setattr(tune, "search", search)
    return asked
