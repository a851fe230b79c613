"""Documents show what docs/results says, and each of its lines has one schema."""

import collections
import statistics

import pytest
from support.repository import assert_none

from scripts.benchmarks import choice, results
from scripts.command import UserError
from scripts.maintenance import make_tables


def test_documents_agree_with_results():
    """After a measurement or an edit: python scripts/maintenance/make_tables.py."""
    stale = *make_tables.stale(), *make_tables.stale_figures()
    changed = [str(path.relative_to(make_tables.ROOT)) for path, _ in stale]
    assert not changed


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("<!-- table: wish -->\n<!-- end -->\n", "there is no table 'wish'"),
        ("<!-- table: choice -->\n", "each marker must have its end"),
        ("<!-- table: choice -->\n<!-- table: choice -->\n<!-- end -->\n", "each marker must have"),
    ],
)
def test_a_marker_that_says_nothing_is_an_error(tmp_path, text, wrong):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(UserError, match=wrong):
        make_tables.filled(path, set())


def test_numbers_in_sentences_are_those_of_the_results():
    x = make_tables.TIMES

    def found(file, attention_pass, calls="dense", peer="jax_cudnn"):
        return make_tables.ratios(make_tables.chosen(file, attention_pass, calls, peer))

    def span(*what):
        return f"{min(found(*what)):.2f}{x} to {max(found(*what)):.2f}{x}"

    def mean(*what):
        return f"{statistics.geometric_mean(found(*what)):.2f}{x}"

    def decoding(name):
        (line,) = make_tables.chosen("h200-triton", "forward", "decode-gqa-128-128k", name)
        return line

    def dq_error(name):
        call = dict(implementation=name, case="causal", D=128, dtype="bfloat16", result="dq")
        call["config"] = dict(key_bias=50, value_mean=0, zero_sum=False)
        found = (r for r in make_tables.lines_of("h200-accuracy") if call.items() <= r.items())
        return [r["error"] for r in found][-1]

    fa3 = "fa3", "flash_attention_3"
    sentences = [
        ("README", f"faster in the forward ({span('h200', 'forward', *fa3)})"),
        ("README", f"slower in the backward ({span('h200', 'backward', *fa3)})"),
        ("README", f"reached {span('h200-triton', 'forward')} the speed of cuDNN in the forward"),
        ("README", f"{span('h200-triton', 'backward')} in the backward"),
        (
            "README",
            f"bfloat16 is {dq_error('ours_mosaic'):.4f}. With cuDNN and FlashAttention-3",
        ),
        *(("README", f"it is {dq_error(x):.3f}. Rotary") for x in ("jax_cudnn", fa3[1])),
        ("docs/index", f"{mean('h200', 'forward')} in the forward"),
        ("docs/index", f"{mean('h200', 'backward')} in the backward"),
        ("docs/benchmarks", f"beside cuDNN is {mean('h200-triton', 'forward')} in the forward"),
        ("docs/benchmarks", f"{mean('h200-triton', 'backward')} in the backward"),
        ("docs/decoding", f"reads {decoding('ours')['tb_per_s']:.2f} TB/s on an H200"),
        ("docs/decoding", f"is {decoding('jax_cudnn')['ratio']['median']:.2f}{x} the speed"),
    ]
    pages = {page: (make_tables.ROOT / f"{page}.md").read_text() for page, _ in sentences}
    missing = [text for page, text in sentences if text not in " ".join(pages[page].split())]
    assert not missing


def test_table_that_no_document_shows_is_an_error(monkeypatch):
    monkeypatch.setitem(make_tables.TABLES, "unused", lambda: "")
    with pytest.raises(UserError, match=r"none shows \['unused'\]"):
        list(make_tables.stale())


def test_steps_are_compared_with_the_shipped_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    assert make_tables.steps("steps") == "The times are not measured yet."

    def line(name, mask, tflops):
        fields = {"shape": mask, "case": f"128 {mask}", "pass": "forward", "tflops": tflops}
        fields["ratio"] = dict(median=600 / tflops, min=600 / tflops, max=600 / tflops, n=1)
        return results.dump(LINE | fields | {"implementation": name, "causal": mask == "causal"})

    first, second, *_ = (path.stem for path in make_tables.STEPS)
    lines = line(first, "full", 300.0), line(second, "full", 400.0), line("ours", "full", 600.0)
    lines += line("step7_persistent", "causal", 594.0), line("ours", "causal", 600.0)
    (tmp_path / "steps.jsonl").write_text("".join(lines))
    _, _, first, *_, seventh, shipped = make_tables.steps("steps").split("\n")
    assert first == f"| step 1 | 300 | 0.50{make_tables.TIMES} | | |"
    assert seventh == f"| step 7 | | | 594 | 0.99{make_tables.TIMES} |"
    assert shipped.startswith("| shipped kernel | 600 | 1.00")
    assert make_tables.step_speed("1", "steps") == "**Measured:** non-causal 300 TFLOP/s."
    assert f"400 TFLOP/s, 1.33{make_tables.TIMES} step 1." in make_tables.step_speed("2", "steps")
    assert make_tables.step_speed("3", "steps") == "**Measured:** not yet."
    assert make_tables.step_speed("7", "steps") == "**Measured:** causal 594 TFLOP/s."


def test_steps_show_what_changes():
    """All that is new is marked so, and all that went; the rest is of both files."""

    def stripped(lines):
        return collections.Counter(filter(None, map(str.strip, lines)))

    for number in range(2, 8):
        before, after = (make_tables._code(make_tables.STEPS[n]) for n in (number - 2, number - 1))
        shown = make_tables.step(str(number)).split("\n")[1:-1]
        marked = {sign: [x[1:] for x in shown if x[0] == sign] for sign in "+- "}
        assert stripped(after) - stripped(before) <= stripped(marked["+"])
        assert stripped(before) - stripped(after) <= stripped(marked["-"])
        assert {*marked["+"], *marked[" "]} <= {*after} and {*marked["-"]} <= {*before}


def test_no_loss_is_left_out():
    """A loss is 1 % or more, after rounding."""
    lost = {
        (r["pass"], r["case"], r["T"], r["implementation"])
        for r in make_tables.records("h200") + make_tables.records("h100")
        if r.get("ratio") and r["ratio"]["median"] < 0.995
    }
    table = make_tables.losses("h200", "h100")
    assert {attention_pass for attention_pass, *_ in lost} == {"forward", "backward"}
    for attention_pass, case, length, peer in lost:
        start = f"| {make_tables.case_in_words(attention_pass, case)} | {make_tables.NAMES[peer]} |"
        (row,) = [row for row in table.split("\n") if row.startswith(start)]
        assert f" at {make_tables.short(length)}" in row


def test_calls_are_as_many_as_the_means_say():
    means, lists = (
        [row.split("|")[1:-1] for row in table("h200", "h100").split("\n")[2:]]
        for table in (make_tables.kinds, make_tables.calls)
    )
    for (name, *counted), (same, *listed) in zip(means, lists, strict=True):
        assert name == same
        for forward, cell in zip(counted[::2], listed, strict=True):
            words = listed[0] if cell.strip() == "the same" else cell
            words = words.split(". ")[0]
            number = sum(
                len(part.rpartition(":")[2].split(",")) * names for part, names in parts_of(words)
            )
            assert number == int(forward.rpartition(", ")[2])


def parts_of(words):
    """Yield each part with the same lengths, and how many calls it names."""
    names = 0
    for part in words.split("; "):
        names += 1
        if ":" in part:
            yield part, names
            names = 0


def test_speeds_are_compared_within_a_run(tmp_path, monkeypatch):
    def line(implementation, ms, **more):
        return results.dump(
            LINE
            | {"pass": "backward", "case": "256 full", "D": 256, "implementation": implementation}
            | {"config": {}, "causal": False, "ms": dict(median=ms, min=ms, n=1)}
            | more
        )

    other_day = dict(date="2000-01-01")
    lines = [line("ours_mosaic", 4.0), line("ours_triton", 5.0)]
    lines += [line("ours_mosaic", 1.0, shape="alone"), line("ours_triton", 9.0, **other_day)]
    (tmp_path / "some.jsonl").write_text("".join(lines))
    monkeypatch.setattr(choice, "RESULTS", tmp_path)
    assert [speed for _, speed in choice.gains("some")] == [1.25]


LINE = make_tables.records("h200-training")[0]


CHANGES = [
    *({name: None} for name in ("device", "versions", "pass", "implementation", "config")),
    {"T": 0},
    dict(date=3),
    {"pass": "sideways"},
    dict(ratio={"median": -1.0}),
    dict(versions={}),
    dict(clocks="fast"),
    dict(red={}),
    dict(ms=1.0),
    dict(ms={"median": 1.0, "min": 1.0}),
    dict(ms={"median": 1.0, "min": 2.0, "n": 3}),
    dict(ms={"median": None, "min": None, "n": 3}),
    dict(ms={"median": float("nan"), "min": 1.0, "n": 3}),
    dict(tflops=float("inf")),
]


def test_lines_of_another_schema_are_refused():
    assert results.problem(LINE) is None
    assert_none(change for change in CHANGES if not results.problem(LINE | change))
    with pytest.raises(ValueError, match="`device` is None"):
        results.dump(LINE | CHANGES[0])
