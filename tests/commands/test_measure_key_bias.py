"""The command that measures the error of dq where keys have a bias."""

from scripts import measure_key_bias
from scripts.benchmark import results


def test_lines_are_results(tmp_path):
    path = tmp_path / "lines.jsonl"
    measure_key_bias.main(
        ["--length", "64", "--head-dims", "16", "--cases", "causal", "--json", str(path)]
    )
    lines = results.load(path)
    errors = {r["implementation"]: r["dq_error"] for r in lines if "dq_error" in r}
    assert errors.keys() >= {"ours_xla", "jax_xla"}
    assert all(0 < error < 0.1 for error in errors.values())
    assert {r["implementation"] for r in lines if "unserved" in r} >= {"ours_mosaic", "jax_cudnn"}
