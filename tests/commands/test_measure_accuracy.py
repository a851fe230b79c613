"""The command that measures errors against float64."""

from scripts.benchmarks import measure_accuracy, results


def test_lines_are_results(tmp_path, monkeypatch):
    cases = ["causal", *measure_accuracy.TRAINED]
    inputs = measure_accuracy.Inputs(value_mean=4, zero_sum=True)
    usual = [measure_accuracy.Problem(x, 16, "bfloat16", inputs) for x in cases]
    monkeypatch.setattr(measure_accuracy, "problems", lambda *options: usual)
    path = tmp_path / "lines.jsonl"
    measure_accuracy.main(["--length", "32", "--jobs", "1", "--json", str(path)])
    lines = results.load(path)
    assert {r["implementation"] for r in lines if "unserved" in r} >= {"ours_mosaic", "jax_cudnn"}
    names = "o", "dq", "dk", "dv", "dsinks", "dalibi_slopes", "dbias", "dtable", "dscale"
    # Both must compute the same call, whatever its options: else one of them is far from float64.
    for name in ("ours_xla", "dense"):
        ours = [r for r in lines if r["implementation"] == name]
        assert {r["case"] for r in ours} == set(cases)
        assert {r["result"] for r in ours} == set(names)
        assert max(r["error"] for r in ours) < 0.1
