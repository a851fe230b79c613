"""Winners of a tuning: which calls they serve, and the file that keeps them."""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import children
from support.described_gpus import described_gpu
from support.repository import imports, inside
from support.tune_cases import (
    FAST,
    FASTER,
    MOSAIC,
    OTHER,
    TRITON,
    arguments,
    command,
    features,
    gpu_here,
    mistake,
    store,
    table,
    tiles_of,
    warned,
    zeros_for_random_numbers,
)
from support.tune_fixtures import h200_here, hopper_here, own_file  # noqa: F401  Tests name them by their arguments.

import pallas_flash
from pallas_flash._autodiff import vjp
from pallas_flash._execution import tile_choice
from pallas_flash._jax import device
from pallas_flash._problem.tile_sizes import (
    asked_implementation,
    filled,
    of_implementation,
    selected,
)
from pallas_flash._selection import tuned
from pallas_flash.tuning import BackwardTile, DqTile, ForwardTile, TileSizes

# ------------------------------------------------------------------------------------------------
# Which calls a winner serves.

ALIKE = {
    "itself": {},
    "another length": {"q_len": 17, "kv_len": 33},
    "examples for heads": {"batch": 2, "heads": 1, "kv_heads": 1},
}
DIFFERENT = {
    "longer queries": {"q_len": 33},
    "shorter queries": {"q_len": 16},
    "longer keys": {"kv_len": 65},
    "more examples": {"batch": 4},
    "more heads": {"heads": 5, "kv_heads": 5},
    "head size": {"size": 24},
    "head size of values": {"value_dim": 24},
    "dtype": {"dtype": jnp.bfloat16},
    "precision": {"precision": "highest"},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 3},
    "lengths": {"key_value_seq_lengths": jnp.asarray([7], jnp.int32)},
    "shared keys": {"kv_heads": 1},
    "bias": {"bias": jnp.zeros((1, 40))},
    "sinks": {"sinks": jnp.zeros(2)},
    "soft cap": {"logits_soft_cap": 5.0},
    "dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("changed", ALIKE.values(), ids=ALIKE)
def test_a_winner_serves_calls_that_are_alike(monkeypatch, h200, changed):
    store()
    assert tiles_of(monkeypatch, **changed) == filled(TRITON, table(**changed))


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT)
def test_and_no_others(monkeypatch, h200, changed):
    store()
    assert tiles_of(monkeypatch, **changed) == table(**changed)
    store(**changed)
    assert tiles_of(monkeypatch, **changed) == filled(TRITON, table(**changed))


def test_enough_programs_are_alike(monkeypatch, h200):
    monkeypatch.setattr(tuned, "MANY", 64)
    store()
    for changed in ({"batch": 4}, {"heads": 5, "kv_heads": 5}):
        assert tiles_of(monkeypatch, **changed) == filled(TRITON, table(**changed))


def test_shared_keys_have_their_own_winner(monkeypatch, h200):
    """Here the numbers of queries and keys of all heads do not tell the calls apart."""
    monkeypatch.setattr(tuned, "MANY", 64)
    store()
    shared = {"heads": 4, "kv_heads": 2}
    assert tiles_of(monkeypatch, **shared) == table(**shared)


def test_nor_on_another_gpu_jax_or_kernel(monkeypatch, h200):
    store()
    for change in (
        lambda patch: gpu_here(patch, "NVIDIA H100"),
        lambda patch: patch.setattr(jax, "__version__", "0.0"),
        lambda patch: patch.setattr(tuned, "_fingerprint", lambda: "0"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert tiles_of(monkeypatch) == table()
    assert tiles_of(monkeypatch) == filled(TRITON, table())


@pytest.mark.parametrize(
    "name",
    [
        "backward_dq.py",
        "common.py",
        "blocks.py",
        "masks.py",
        "mask_leaves.py",
        "traversal.py",
        "scores.py",
        "operands.py",
        "dropout.py",
        "products.py",
    ],
)
def test_the_fingerprint_is_of_the_kernels(monkeypatch, name):
    before, read = tuned._fingerprint(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#" * (self.name == name))
    assert tuned._fingerprint.__wrapped__() != before


def test_the_fingerprint_is_of_all_that_kernels_import():
    """But for the problem, which is the key, and for what a version of JAX decides."""
    of_kernels, left_out = ("_backends.triton", "_backends.mosaic"), tuned._NOT_KERNELS
    inner = {inside(name): set(map(inside, below)) for name, below in imports().items()}
    files = [
        name
        for name in inner
        if name.startswith(of_kernels) and f"{name.rpartition('.')[2]}.py" not in left_out
    ]
    below = set().union(*(inner[name] for name in files))
    tiles = ("_problem.tile_sizes", "_problem.configurations")
    others = {name for name in below if not name.startswith((*of_kernels, *tiles))}
    shape = {name.replace("/", ".") for name in tuned._SHAPE}
    problem = {"_problem.features", "_problem.problem", "_problem.paged"}
    assert others <= {*shape, *problem, "_jax.compat"}


BLOCKS_OF_A_PREDICATE = pallas_flash.masks.BlockMask.from_mask(
    pallas_flash.masks.Predicate(lambda b, h, q, k: q > k), 24, 40
)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full"),
        ({"is_causal": True}, "causal"),
        ({"is_causal": True, "query_offset": 3}, "causal"),
        ({"is_causal": True, "query_offset": jnp.asarray([3], jnp.int32)}, "causal by arrays"),
        ({"is_causal": True, "local_window_size": (4, None)}, "ranges"),
        (
            {"is_causal": True, "key_value_seq_lengths": jnp.asarray([7], jnp.int32)},
            "lengths by arrays",
        ),
        ({"local_window_size": (4, None)}, "ranges"),
        (
            {"segment_ids": (jnp.zeros((1, 24), jnp.int32), jnp.zeros((1, 40), jnp.int32))},
            "documents by arrays",
        ),
        ({"mask": pallas_flash.masks.PrefixLM(jnp.asarray([7], jnp.int32))}, "ranges by arrays"),
        ({"mask": jnp.ones((1, 40), bool)}, "mask array by arrays"),
        ({"mask": jnp.ones((1, 40), bool), "is_causal": True}, "mask array by arrays"),
        ({"mask": pallas_flash.masks.BlockMask(jnp.ones((1, 1, 1, 1), bool))}, "blocks by arrays"),
        ({"mask": pallas_flash.masks.Predicate(lambda b, h, q, k: q > k)}, "predicate"),
        ({"mask": BLOCKS_OF_A_PREDICATE}, "blocks by arrays"),
    ],
)
def test_kinds_of_masks(options, kind):
    assert f" {kind} mask, T 32, S 64" in tuned.key(features(**options), "a GPU")


def halved(s, *at):
    return s / 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_key": jax.random.key(0)}, ""),
        ({"bias": jnp.zeros(40)}, " + bias"),
        ({"bias": jnp.zeros((24, 40), jnp.float16)}, " + bias in 16 bits + 2 bytes a pair"),
        ({"alibi_slopes": jnp.zeros(2)}, " + slopes"),
        ({"score_mod": halved}, " + score function"),
        ({"logits_soft_cap": 3, "sinks": jnp.zeros(2)}, " + soft cap + sinks"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, " + dropout"),
    ],
)
def test_what_is_done_to_scores_and_probabilities_counts(options, words):
    assert f" full mask{words}, T 32, S 64" in tuned.key(features(**options), "a GPU")


def test_batch_invariant_calls_have_no_winner_of_others():
    calls = [dataclasses.replace(features(), batch_invariant=x) for x in (False, True)]
    assert len({tuned.key(f, "a GPU") for f in calls}) == 2


def test_precision_counts_for_float32_however_it_is_set():
    with jax.default_matmul_precision("highest"):
        inherited = tuned.key(features(), "a GPU")
        half = tuned.key(features(dtype=jnp.float16), "a GPU")
    assert inherited == tuned.key(features(precision="highest"), "a GPU")
    assert inherited != tuned.key(features(), "a GPU")
    assert half == tuned.key(features(dtype=jnp.float16), "a GPU")


def test_tiles_that_are_asked_for_come_first(monkeypatch, h200):
    store()
    asked = TileSizes(dq=OTHER)
    expected = dataclasses.replace(filled(TRITON, table()), dq=OTHER)
    assert tiles_of(monkeypatch, config=asked) == expected
    split = TileSizes(forward=OTHER, dk=OTHER, dv=OTHER, dq=OTHER)
    assert tiles_of(monkeypatch, config=split) == filled(split, table())


def test_tiles_for_calls_of_all_lengths_leave_one_forward_kernel(monkeypatch, h200):
    both = TileSizes(forward=FAST, decode=OTHER)
    for q_len, wanted in ((16, (None, OTHER)), (33, (FAST, None))):
        tuned.store(features(q_len=q_len), "NVIDIA H200", TileSizes(dq=FASTER))
        tiles = tiles_of(monkeypatch, q_len=q_len, config=both)
        assert (tiles.forward, tiles.decode, tiles.dq) == (*wanted, FASTER)


def test_the_interpreter_has_the_tables(monkeypatch, h200):
    store()
    assert tiles_of(monkeypatch, implementation="interpret") == table()


def test_a_described_gpu_has_the_tables_and_the_file_is_not_read(monkeypatch):
    store()

    def read(path):
        raise AssertionError("read")

    with monkeypatch.context() as patch, described_gpu("NVIDIA H200"):
        patch.setattr(tuned, "read", read)
        assert tiles_of(monkeypatch) == table()
        choice = pallas_flash.explain(**arguments())
    assert choice.implementation == "triton"
    assert "tuned" not in str(choice)


def test_a_mesh_describes_gpus_that_are_here(monkeypatch):
    """As inside of shard_map."""

    class Gpu:
        platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"

        class client:
            platform_version = "cuda 13000"

    store(gpu="NVIDIA H200")
    store(gpu="NVIDIA H100")
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu])
    with described_gpu("NVIDIA H200"):
        assert tiles_of(monkeypatch) == filled(TRITON, table())
    with described_gpu("NVIDIA H100"):
        assert tiles_of(monkeypatch) == table()


def test_explain_tells_where_tiles_come_from(h200, file):
    assert "tuned" not in str(pallas_flash.explain(**arguments()))
    store()
    reason = pallas_flash.explain(**arguments()).reason
    assert reason == f"the kernels serve this call on this GPU. Its tiles are tuned, from {file}."
    asked = arguments(config=TileSizes())
    assert pallas_flash.explain(**arguments(is_causal=True)).reason in reason
    assert "tuned" not in pallas_flash.explain(**asked, implementation="interpret").reason


# ------------------------------------------------------------------------------------------------
# Who computes, by a winner.

LONG = dict(q_len=2048, kv_len=2048, heads=32, kv_heads=32, size=128, value_dim=128)
LONG |= dict(dtype=jnp.bfloat16, batch=2)


def explained(**options):
    shapes = {
        name: jax.ShapeDtypeStruct((2, 2048, 32, 128), jnp.bfloat16)
        for name in ("query", "key", "value")
    }
    return pallas_flash.explain(**shapes, **options)


@pytest.mark.parametrize(
    ("tiles", "forward", "why_not", "backward"),
    [
        (None, "mosaic", "Slower than the kernels for Hopper.", ""),
        (TileSizes(forward=FAST), "triton", '"triton" was faster when such calls were tuned', ""),
        (TRITON, "triton", '"triton" was faster when such calls were tuned on this GPU.', ""),
        (
            TileSizes(FAST, backward=BackwardTile()),
            "triton",
            '"triton" was faster',
            '"mosaic" computes the backward: "mosaic" was faster when such calls were tuned',
        ),
        (
            TileSizes(ForwardTile(), dkv=FAST, dq=FAST),
            "mosaic",
            '"mosaic" was faster when such calls were tuned on this GPU.',
            '"triton" computes the backward: "triton" was faster when such calls were tuned',
        ),
    ],
    ids=["nothing", "forward", "triton", "backward by mosaic", "forward by mosaic"],
)
def test_a_winner_chooses_who_computes_each_pass(
    monkeypatch, hopper, file, tiles, forward, why_not, backward
):
    # By the table "mosaic" is faster in both.
    if tiles is not None:
        zeros_for_random_numbers(monkeypatch)
        tuned.store(features(**LONG), "NVIDIA H200", tiles)
    monkeypatch.setattr(tile_choice, "completed", asked_alone)
    choice = explained()
    assert choice.implementation == forward
    assert why_not in choice.refused["triton" if forward == "mosaic" else "mosaic"]
    assert backward in choice.reason
    assert (f"Its tiles are tuned, from {file}." in choice.reason) == (tiles is not None)
    # An explicit implementation comes first.
    other = "mosaic" if forward == "triton" else "triton"
    assert explained(implementation=other).implementation == other
    given = {"mosaic": TileSizes(forward=ForwardTile()), "triton": TileSizes(forward=OTHER)}[other]
    choice = explained(config=given)
    assert choice.implementation == other
    assert f'are those of "{other}"' in choice.refused[forward]


def asked_alone(asked, problem, features, implementation, kernels):
    """Stands in for `completed`, which needs the kernels: returns no default tile."""
    return selected(asked, kernels)


def plan_of(monkeypatch, **options):
    """Return the plan of a call of `attention`."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(vjp, "attend", lambda plan, *_: used.append(plan) or (jnp.zeros(()), None))
        patch.setattr(tile_choice, "completed", asked_alone)
        x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
        pallas_flash.attention(x, x, x, **options)
    [plan] = used
    return plan


@pytest.mark.parametrize(
    ("given", "reproducible", "by", "in_order"),
    [
        (MOSAIC, False, "mosaic", False),
        (MOSAIC, True, "mosaic", True),
        (selected(MOSAIC, ["dkv", "dq"]), False, "mosaic", True),
        (selected(MOSAIC, ["dq"]), False, "mosaic", True),
        (selected(MOSAIC, ["backward"]), False, "mosaic", False),
        (selected(MOSAIC, ["backward"]), True, "mosaic", True),
        (dataclasses.replace(TRITON, backward=BackwardTile(128)), False, "mosaic", False),
        (dataclasses.replace(TRITON, backward=BackwardTile(128)), True, "mosaic", True),
        (TRITON, False, "triton", False),
    ],
)
def test_tiles_say_how_gradients_are_computed(
    monkeypatch, hopper, given, reproducible, by, in_order
):
    """In one pass or in two, or by "triton", to which so short a call goes without tiles."""
    plan = plan_of(monkeypatch, config=given, reproducible=reproducible)
    assert (plan.backward.implementation, plan.backward.in_order) == (by, in_order)
    assert plan.implementation == (asked_implementation(given, "forward") or "triton")
    assert plan.forward.tiles == selected(
        of_implementation(given, plan.implementation), ["forward"]
    )
    kernels = ["backward"] if by == "mosaic" and given.backward else ["dkv", "dq"]
    assert plan.backward.tiles == selected(of_implementation(given, by), kernels)


def test_tiles_of_mosaic_do_not_matter_where_it_does_not_serve(monkeypatch):
    gpu_here(monkeypatch, "NVIDIA A100")
    monkeypatch.setattr(device, "target", lambda: device.Target("NVIDIA A100", True, (8, 0)))
    plan = plan_of(monkeypatch, config=MOSAIC)
    assert (plan.implementation, plan.backward.implementation) == ("triton", "triton")
    assert plan.forward.tiles == plan.backward.tiles == TileSizes()


# ------------------------------------------------------------------------------------------------
# The file.


def test_passes_are_merged(file):
    store(TileSizes(forward=FAST, dkv=FAST))
    store(TileSizes(dq=FAST), is_causal=True)
    store(TileSizes(dk=OTHER, dv=OTHER, dq=OTHER))
    assert tuned.read(file) == {
        tuned.key(features(), "NVIDIA H200"): TileSizes(forward=FAST, dk=OTHER, dv=OTHER, dq=OTHER),
        tuned.key(features(is_causal=True), "NVIDIA H200"): TileSizes(dq=FAST),
    }


def test_tiles_of_both_implementations_are_stored(monkeypatch, capsys, file):
    sizes = dataclasses.replace(TRITON, forward=ForwardTile(3, 96), backward=BackwardTile(128))
    sizes = dataclasses.replace(sizes, decode=FAST)
    store(sizes)
    assert list(tuned.read(file).values()) == [sizes]
    # A pass that is tuned again is forgotten whole, and the other one kept.
    store(TileSizes(dkv=BackwardTile(), dq=DqTile()))
    [merged] = tuned.read(file).values()
    two_passes = dict(dkv=BackwardTile(), dq=DqTile())
    assert merged == TileSizes(ForwardTile(3, 96), FAST, **two_passes)
    assert command(monkeypatch, "--show") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  forward   mosaic, warpgroups 3, block_kv 96, output_slots 1, stages 2, cluster_size 1",
        "  decode    32 x 32, 1 warps, 1 stages",
        "  dkv       mosaic, block_q 64, stages 2",
        "  dq        mosaic, warpgroups 2, block_kv 128, stages 2",
    ]


def test_the_file_is_read_once_and_again_after_a_store(monkeypatch, h200, file):
    assert tiles_of(monkeypatch) == table()
    store()
    first = file.read_text()
    assert tiles_of(monkeypatch) == filled(TRITON, table())
    file.unlink()
    assert tiles_of(monkeypatch) == filled(TRITON, table())
    store(TileSizes(forward=OTHER))
    assert tiles_of(monkeypatch).forward == OTHER
    file.write_text(first)
    assert tiles_of(monkeypatch).forward == OTHER


@pytest.mark.parametrize("failing", ["mkstemp", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(monkeypatch, h200, file, failing):
    """As in a folder to be read alone, or on a full disk. The winner serves this process."""
    store()
    before = file.read_text()

    def fail(*args, **options):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile if failing == "mkstemp" else os, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            store(TileSizes(forward=OTHER))
    assert file.read_text() == before
    assert sorted(file.parent.iterdir()) == [file, lock_of(file)]
    both = dataclasses.replace(TRITON, forward=OTHER)
    assert tiles_of(monkeypatch) == filled(both, table())
    # The next one that can be written takes it along.
    store(is_causal=True)
    assert list(tuned.read(file).values()) == [both, TRITON]


STORE = """
import sys
from pallas_flash._selection import tuned
from support.tune_cases import FAST, features
from pallas_flash.tuning import TileSizes
f = features()
print("ready", flush=True)
input()
for i in range(20):
    tuned.store(f, f"{sys.argv[1]} {i}", TileSizes(forward=FAST))
"""


def test_winners_of_several_processes_are_all_kept(file):
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    pipes = dict(stdin=children.PIPE, stdout=children.PIPE, text=True, env=environment)
    running = [children.start([sys.executable, "-c", STORE, name], **pipes) for name in "abc"]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0
    stored = {name.split(",")[0] for name in tuned.parse(file)}
    assert stored == {f"{name} {i}" for name in "abc" for i in range(20)}


@pytest.mark.parametrize("missing", ["module", "lock"])
def test_without_locks_there_is_a_warning(monkeypatch, file, missing):
    def no_lock(*args):
        raise OSError("no locks available")

    if missing == "module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", no_lock)
    with warned(1, f"stores in {file} without a lock"):
        store()
        store(is_causal=True)
    assert len(tuned.read(file)) == 2


def test_others_may_read_the_file_as_before(file):
    """Not only its owner, as with a temporary file."""
    store()
    assert file.stat().st_mode == lock_of(file).stat().st_mode
    file.chmod(0o664)
    store(is_causal=True)
    assert file.stat().st_mode & 0o777 == 0o664


def lock_of(file):
    return file.with_name(f"{file.name}.lock")


def edited(change):
    """The content of a file with one winner, changed."""

    def content(file):
        store()
        content = json.loads(file.read_text())
        change(content)
        return json.dumps(content).encode()

    return content


def of_the_winner(change):
    return edited(lambda content: change(*content["winners"].values()))


def damaged(change):
    """The content of a file with two winners, changed as bytes; the first one stays whole."""

    def content(file):
        store(TileSizes(forward=FAST), "first")
        store(TileSizes(forward=FASTER), "second")
        return change(file.read_bytes())

    return content


# The content, and how many winners are left.
DAMAGED = {
    "empty": (lambda file: b"", 0),
    "zeros": (lambda file: bytes(512), 0),
    "cut in the head": (damaged(lambda content: content[:12]), 0),
    "cut before winners": (damaged(lambda content: content[: content.index(b"first")]), 0),
    "cut in a winner": (damaged(lambda content: content[: content.index(b"second") + 90]), 1),
    "cut after winners": (damaged(lambda content: content[:-5]), 2),
    "zeros at the end": (damaged(lambda content: content[:-99] + bytes(99)), 1),
    "zeros inside": (damaged(lambda content: content.replace(b"first", bytes(5))), 1),
    "more at the end": (damaged(lambda content: content + b" }\n}\n"), 2),
}
FOREIGN = {
    "cut short": lambda file: b'{"winners": {',
    "not text": lambda file: b"\xff\xfe\x00",
    "nested too deep": lambda file: b"[" * 100_000,
    "a bare number": lambda file: b"1",
    "a list": lambda file: b"[]",
    "another program's": lambda file: b'{"schema": 1, "winners": {}}',
    "signed by another": edited(lambda content: content.update(made_by="tune")),
}
OTHER_FORM = {
    "an older schema": edited(lambda content: content.update(schema=2)),
    "a newer schema": edited(lambda content: content.update(schema=4)),
    "no schema": edited(lambda content: content.pop("schema")),
    "no winners": edited(lambda content: content.pop("winners")),
    "a size that is none": of_the_winner(lambda winner: winner["dq"].update(block_q=7)),
    "a size of another type": of_the_winner(lambda winner: winner["dq"].update(block_q="64")),
    "an unknown size": of_the_winner(lambda winner: winner["dq"].update(cluster=2)),
    "an unknown kernel": of_the_winner(lambda winner: winner.update(dbias=winner["dq"])),
    "dk alone": of_the_winner(lambda winner: winner.update(dk=winner.pop("dkv"))),
}
# Tiles of the form, but beyond the shared memory: a lookup refuses them.
TOO_LARGE = of_the_winner(
    lambda winner: winner["dq"].update(block_q=256, block_kv=256, num_stages=8)
)
UNREADABLE = FOREIGN | OTHER_FORM | {"too large": TOO_LARGE}


def put(file, content):
    """Writes what one of these tables makes; returns it."""
    file.parent.mkdir(exist_ok=True)
    content = content(file)
    file.write_bytes(content)
    tuned.read.cache_clear()
    return content


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_ignored_with_one_warning(monkeypatch, h200, file, content):
    content = put(file, content)
    with warned(1, f"ignores the tuned tiles in {file}: "):
        for _ in range(3):
            assert tiles_of(monkeypatch) == table()
            assert "tuned" not in str(pallas_flash.explain(**arguments()))
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", FOREIGN | OTHER_FORM)
def test_a_file_of_something_else_is_neither_overwritten_nor_shown(monkeypatch, capsys, file, name):
    content = put(file, (FOREIGN | OTHER_FORM)[name])
    sentence = "wrote, or none; got another" if name in FOREIGN else "this version's form"
    with pytest.raises(ValueError, match=sentence):
        store()
    assert command(monkeypatch, "--show") == 2
    assert sentence in mistake(capsys)
    assert file.read_bytes() == content
    assert {*file.parent.iterdir()} == {file, lock_of(file)}


@pytest.mark.parametrize(("content", "left"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_keeps_what_can_be_read(monkeypatch, capsys, h200, file, content, left):
    put(file, content)
    with warned(1, f"found {file} empty or damaged: it uses the {left} winners"):
        assert tiles_of(monkeypatch) == table()
        tuned.check()
        assert len(tuned.read(file)) == left
        assert command(monkeypatch, "--show") == 0
        store()
    assert len(json.loads(file.read_text())["winners"]) == left + 1
    with warned(0):
        assert tiles_of(monkeypatch) == filled(TRITON, table())


def test_a_damaged_file_is_removed(monkeypatch, file):
    put(file, DAMAGED["cut in a winner"][0])
    with warned(1, "empty or damaged"):
        assert command(monkeypatch, "--clear") == 0
    assert not file.exists()


@pytest.mark.parametrize("name", UNREADABLE)
def test_only_what_we_wrote_is_removed(monkeypatch, capsys, file, name):
    content = put(file, UNREADABLE[name])
    ours = name not in FOREIGN
    assert command(monkeypatch, "--clear") == (0 if ours else 2)
    if ours:
        assert capsys.readouterr().out == f"removed {file}\n"
        assert not file.exists()
    else:
        assert "Move it away, or name another file in PALLAS_FLASH_TUNED." in mistake(capsys)
        assert file.read_bytes() == content


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_regular_file_stays(monkeypatch, capsys, h200, file, make):
    file.parent.mkdir()
    make(file)
    with warned(1, "wrote, or none; got another"):
        assert tiles_of(monkeypatch) == table()
    with pytest.raises(ValueError, match="wrote, or none; got another"):
        store()
    assert command(monkeypatch, "--clear") == 2
    assert sorted(file.parent.iterdir()) == [file, lock_of(file)]


def test_a_missing_file_is_nothing_to_tell(monkeypatch, h200):
    with warned(0):
        assert tiles_of(monkeypatch) == table()


def test_winners_can_be_switched_off(monkeypatch, h200, file):
    store()
    monkeypatch.setenv("PALLAS_FLASH_TUNED", "0")
    assert tiles_of(monkeypatch) == table()
    before = file.read_text()
    assert store(TileSizes(forward=OTHER)) is None
    assert file.read_text() == before
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(file))
    assert tiles_of(monkeypatch) == filled(TRITON, table())


@pytest.mark.parametrize("value", [None, "", "1"])
def test_the_file_is_in_the_users_cache_folder(monkeypatch, tmp_path, value):
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.delenv("PALLAS_FLASH_TUNED")
    if value is not None:
        monkeypatch.setenv("PALLAS_FLASH_TUNED", value)
    assert tuned.file() == tmp_path / "pallas_flash" / "tiles.json"
