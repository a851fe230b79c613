"""scripts/benchmarks/bench_pages.py, on a CPU: steps of a server, checked and timed."""

import jax.numpy as jnp
import numpy as np

from pallas_flash._jax import compat
from scripts.benchmarks import bench_pages, results
from scripts.benchmarks.bench_pages import Case

SIZES = "--heads 4 --kv-heads 2 --head-dims 16 --page-sizes 16 --rounds 2 --iterations 2"


def test_a_small_case_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_pages, "cudnn", lambda calls: jnp.zeros((22, 4, 16)))
    by_mosaic = "mosaic=2,64,3" if compat.has_mosaic_gpu() else "mosaic"
    peers = ["xla", by_mosaic, "cudnn"]
    file = tmp_path / "lines"
    bench_pages.main(["--cases", "small", *SIZES.split(), "--peers", *peers, "--json", str(file)])
    records = {r["implementation"]: r for r in results.load(file)}
    assert set(records) == {"xla", "mosaic", "cudnn"}
    assert records["xla"]["ms"]["n"] == 2 and records["xla"]["T"] == 20
    assert "capability 9.0" in records["mosaic"]["unserved"]
    assert f"| small | 16 | 16 | {by_mosaic} | " in capsys.readouterr().out


def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch):
    file, errors = tmp_path / "lines", {"o": 0.5}
    monkeypatch.setattr(bench_pages, "errors", lambda *_: errors)
    bench_pages.main(["--cases", "small", *SIZES.split(), "--peers", "xla", "--json", str(file)])
    [record] = results.load(file)
    assert record["red"] == errors and "ms" not in record


def test_cases_count_visible_pairs_and_have_all_pages_once():
    assert Case(2, 64, chunk=20).pairs() == 2 * 64 + 20 * 64 - 20 * 19 // 2
    case = Case(5, 100, ragged=True)
    arrays = bench_pages.draw(case, (4, 2, 16, 16), "bfloat16", 0)
    lengths, table = (np.asarray(arrays[x]) for x in ("key_value_seq_lengths", "page_indices"))
    pages = -(-lengths // 16)
    used = [n for row, count in zip(table, pages, strict=True) for n in row[:count]]
    assert sorted(used) == list(range(len(arrays["key_pages"])))
    [(q, k, v, n)] = bench_pages.contiguous(arrays, case)["calls"]
    np.testing.assert_array_equal(k[3, 20], arrays["key_pages"][table[3, 1], 4])
    assert q.shape == (5, 1, 4, 16) and v.shape == k.shape and (n == lengths).all()
