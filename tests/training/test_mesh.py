"""Training on several devices and in several processes gives the same run.

Eight CPUs are simulated for the meshes, whose number is fixed when JAX starts, so that these checks
run in a process of their own. Several processes are real ones, on this machine.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import cases, children
from support.decoder_files import make, tokenizer_of_bytes
from support.repository import ROOT
from support.tiny_run import TINY as FOR_ONE_DEVICE
from support.tiny_run import flags, metrics, model_of

import models.sharding
from models import Decoder
from models.checkpoint import open_file
from models.sharding import AXES, Layout
from models.train import main
from models.training import loop
from models.training.folder import RunFolder
from models.training.loop import train
from models.training.mesh import make_layout
from models.training.settings import mesh_sizes
from models.training.text import Text, load_text, training_batch

DEVICES = 8

TINY = dataclasses.replace(FOR_ONE_DEVICE, num_layers=2, num_heads=4, num_kv_heads=2, batch_size=8)
# Relative difference between the losses of two meshes, which add in other orders.
CLOSE = 1e-6


def assert_close(got, want):
    assert [line["step"] for line in got] == [line["step"] for line in want]
    for name in ("loss", "val_loss", "lr"):
        x, y = ([line[name] or 0.0 for line in lines] for lines in (got, want))
        np.testing.assert_allclose(x, y, rtol=CLOSE, err_msg=name)


# ------------------------------------------------------------------------------------ eight devices


def mesh_of(count):
    """Return a mesh with all devices on the axis `data`."""
    devices = jax.devices()[:count]
    types = (AxisType.Auto,) * len(AXES)
    return Layout(jax.make_mesh((count, 1, 1, 1), AXES, axis_types=types, devices=devices))


class Killed(BaseException):
    """The end of a process."""


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def as_on_one_device(config, run):
    one = dataclasses.replace(config, out_dir=f"{config.out_dir}-1")
    with replaced(loop, "make_layout", lambda config, model: mesh_of(1)):
        train(one)
    assert_close(metrics(run), metrics(one))


def check_a_mesh_trains_as_one_device(config):
    """Parameters, batch and heads are divided."""
    config = dataclasses.replace(config, num_layers=1)
    run = dataclasses.replace(config, attention="xla", mesh="data=2,fsdp=2,tensor=2")
    train(run)
    as_on_one_device(config, run)


def check_a_run_goes_on_where_all_is_divided_otherwise(config):
    """Tokens are divided, too; with remat, and with the gradient check."""
    changed = dict(attention="xla", remat=True, mesh="fsdp=2,sequence=2,tensor=2")
    run = dataclasses.replace(config, **changed)
    with contextlib.suppress(Killed), replaced(loop, "training_batch", dying_at(7)):
        train(dataclasses.replace(run, gradient_check=True))
    train(dataclasses.replace(run, mesh="data=2,sequence=4"))
    as_on_one_device(config, run)


def dying_at(step):
    def training_batch(text, at, *args, real=loop.training_batch):
        if at == step:
            raise Killed
        return real(text, at, *args)

    return training_batch


def check_each_device_holds_its_part(config):
    """Parameters and moments are divided when they are made and when they are restored."""
    config = dataclasses.replace(config, mesh="data=2,fsdp=2,tensor=2")
    model = model_of(config)
    layout = make_layout(config, model)
    init_state, train_step, _ = loop.make_steps(config, model, layout)
    state = init_state()
    assert int(state.step) == 0
    with RunFolder(config, "") as folder:
        folder.save(1, state)
        read = folder.restore(1, init_state, layout.shardings)
        other = make_layout(dataclasses.replace(config, mesh="fsdp=4,tensor=2"), model)
        moved = folder.restore(1, init_state, other.shardings)
    for some, parts in ((state, 4), (read, 4), (moved, 8)):
        leaves = jax.tree.leaves_with_path(some)
        matrices = [x for path, x in leaves if x.ndim > 1]
        # Parameters, and two moments of each.
        assert len(matrices) == 3 * (1 + 2 * 7)
        for x in matrices:
            (size,) = {shard.data.size for shard in x.addressable_shards}
            # The embedding of the bytes has no tensor axis.
            assert size == x.size / (parts // 2 if 256 in x.shape else parts)
        for (_, x), y in zip(leaves, jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

    # Weights are gathered, and never what is computed from the text.
    batch = training_batch(load_text(config), 1, config, layout)
    text = train_step.lower(state, batch).compile().as_text()
    gathered = re.findall(r" = \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    weights = {"8,16", "16,8", "4,16", "16,4", "16,32", "32,16", "16,256", "256,16"}
    assert gathered and set(gathered) <= weights, gathered
    assert "all-to-all" not in text


def check_attention_is_sent_once_with_remat(config):
    """The backward sends nothing of the forward again, because remat keeps its results."""
    counts = []
    for remat in (False, True):
        changed = dict(attention="xla", remat=remat, mesh="data=4,sequence=2", accumulation=1)
        config = dataclasses.replace(config, **changed)
        layout = make_layout(config, model_of(config))
        init_state, train_step, _ = loop.make_steps(config, model_of(config), layout)
        batch = training_batch(load_text(config), 1, config, layout)
        lowered = train_step.lower(init_state(), batch)
        # XLA's partitioner has no part to lower anew for every layer.
        assert "CustomSPMDPartitioning" not in lowered.as_text()
        text = lowered.compile().as_text()
        # Positions, which are not kept, are a few bytes.
        sent = r" = f32\S* (?:all-gather|all-to-all|collective-permute)\("
        counts.append(len(re.findall(sent, text)))
    assert counts[0] == counts[1] > 0, counts


def check_weights_are_tuned_as_on_one_device(config):
    """Packed documents give the same losses; the copy is whole, its parameters divided."""
    folder, read = Path(config.out_dir).parent, loop.load_text
    make("qwen2", vocab_size=256, max_position_embeddings=64).save_pretrained(folder / "weights")

    def load_text(config):
        text = read(dataclasses.replace(config, data=str(sys.argv[2])))
        sides = (
            side._replace(ends=np.flatnonzero(side.tokens == ord(",")) + 1)
            for side in (text.train, text.held_out)
        )
        return Text(*sides, *text[2:])

    run = dataclasses.replace(
        config,
        remat=True,
        attention="xla",
        init_from=str(folder / "weights"),
        data=str(folder),
        mesh="fsdp=2,sequence=2,tensor=2",
        gradient_check=True,
    )
    with replaced(loop, "load_text", load_text):
        train(run)
        as_on_one_device(dataclasses.replace(run, gradient_check=False), run)
    copies = [
        open_file(Path(f"{run.out_dir}{x}", "weights", "model.safetensors")) for x in ("", "-1")
    ]
    for name, x in copies[0].items():
        np.testing.assert_allclose(x, copies[1][name], atol=1e-4)


def check_conversations_are_tuned_as_on_one_device(config):
    """Answers lie in the order of the tokens, whose number is a multiple of twice the devices."""
    folder = Path(config.out_dir).parent / "weights"
    make("qwen2", vocab_size=264, max_position_embeddings=88).save_pretrained(folder)
    tokenizer_of_bytes(["<end>"]).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    with open(folder / "chats.jsonl", "w") as file:
        for n in range(9):
            turns = [("user", "q" * n), ("assistant", "a" * (9 - n)), ("assistant", "b")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    paths = dict(init_from=str(folder), conversations=str(folder / "chats.jsonl"), data=None)
    run = dataclasses.replace(config, **paths, context=88, attention="xla", gradient_check=True)
    run = dataclasses.replace(run, mesh="fsdp=2,sequence=2,tensor=2")
    train(run)
    as_on_one_device(dataclasses.replace(run, gradient_check=False), run)


# The lines that each check prints.
CHECKS = {
    check_a_mesh_trains_as_one_device: [
        "device     8 x cpu (cpu), ",
        "mesh       data=2, fsdp=2, tensor=2\n",
        "a device computes 1 sequences at once, 12 tokens of each, 2 heads, 32 hidden units\n",
        "and holds 1/4 of every matrix of parameters\n",
    ],
    check_a_run_goes_on_where_all_is_divided_otherwise: [
        "a device computes 2 sequences at once, 3 tokens of each, ",
        "work is unequal: a multiple of 8 as the context would make it equal\n",
        "resuming   after step 5,",
    ],
    check_each_device_holds_its_part: [],
    check_weights_are_tuned_as_on_one_device: [
        "files to train on",
        "/run/weights, in float32",
    ],
    check_conversations_are_tuned_as_on_one_device: ["carry loss, in 4 rows"],
    check_attention_is_sent_once_with_remat: [],
}

# The checks that compare gradients.
CHECKING = (
    check_a_run_goes_on_where_all_is_divided_otherwise,
    check_weights_are_tuned_as_on_one_device,
    check_conversations_are_tuned_as_on_one_device,
)


@pytest.mark.parametrize("check", cases.default([check_a_mesh_trains_as_one_device], CHECKS))
def test_eight_devices_train_as_one(corpus, tmp_path, check):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, check.__name__, str(corpus), str(tmp_path / "run")]
    done = children.run(
        command, env=environment | CHEAP, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in CHECKS[check] if line not in done.stdout] == []
    errors = re.findall(r"gradients  relative error (\S+) against the reference", done.stdout)
    assert len(errors) == (check in CHECKING)
    assert all(0 < float(error) < loop.GRADIENT_BOUND / 10 for error in errors)


# -------------------------------------------------------------------------------- several processes

# The same programs in all processes, of which nobody waits for the optimiser.
CHEAP = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Processes:
    """Some processes of one run, each with some devices.

    Args:
        config: Their settings.
        count: How many there are; a single one is no `jax.distributed`'s.
        cache: A folder for compiled programs.
        devices: How many devices each has.
        cluster: Whether they are to find each other as tasks of Slurm do.
    """

    def __init__(self, config, count, cache, devices=1, *, cluster=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | CHEAP | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        environment["XLA_FLAGS"] = (
            f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
        several = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
        self.config = config
        self.outputs = [Path(f"{config.out_dir}.{i}") for i in range(count)]
        self.all = []
        for i, output in enumerate(self.outputs):
            which = [*several, "--process-id", str(i)] if count > 1 else []
            if cluster:
                which = ["--cluster"]
                task = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": count}
                task |= {"PROCID": i, "LOCALID": i}
                environment |= {f"SLURM_{name}": str(value) for name, value in task.items()}
                environment["JAX_COORDINATOR_PORT"] = str(port)
            with open(output, "a") as out, open(f"{output}.err", "a") as err:
                self.all.append(
                    children.start(
                        [sys.executable, "-m", "models.train", *flags(config), *which],
                        env=environment,
                        cwd=ROOT,
                        stdout=out,
                        stderr=err,
                    )
                )

    def wait_for(self, steps, limit=240):
        """Until metrics.jsonl has so many lines, or the run has ended."""
        path = Path(self.config.out_dir, "metrics.jsonl")
        deadline = time.monotonic() + limit
        while not path.exists() or path.read_text().count("\n") < steps:
            if any(process.poll() is not None for process in self.all):
                return
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ended(self, within=240):
        """The exit status of each."""
        deadline = time.monotonic() + within
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.all]
        finally:
            for process in self.all:
                process.kill()

    def errors(self):
        """Return what each wrote to its standard error since the start of the first."""
        return [Path(f"{output}.err").read_text() for output in self.outputs]


def long_run(config, corpus, **changes):
    """Many short steps with a checkpoint after every other: a kill falls anywhere among them."""
    settings = {"steps": 40, "log_every": 1, "checkpoint_every": 2} | changes
    return dataclasses.replace(config, data=str(corpus), **settings)


def ends_like_one_process(config, tmp_path):
    """Two processes that take a run to its end, with the results of one with two devices."""
    processes = Processes(config, 2, tmp_path)
    whole = dataclasses.replace(config, out_dir=str(tmp_path / "whole"))
    one = Processes(whole, 1, tmp_path, devices=2)
    assert processes.ended() == [0, 0], processes.errors()
    assert one.ended() == [0], one.errors()
    assert metrics(config) == metrics(whole)
    return processes, one


@pytest.mark.extended
def test_ten_kills_lose_and_double_no_step(corpus, tmp_path):
    config = long_run(TINY, corpus, out_dir=str(tmp_path / "run"), steps=300)
    for kill in range(10):
        path = Path(config.out_dir, "metrics.jsonl")
        before = path.read_text().count("\n") if path.exists() else 0
        processes = Processes(config, 2, tmp_path)
        # While it starts, or among the steps.
        if kill % 3:
            processes.wait_for(before + random.randrange(1, 25))
        time.sleep(random.uniform(0, 0.3 if kill % 3 else 8))
        which = random.randrange(2)
        processes.all[which].send_signal(signal.SIGKILL)
        started = time.monotonic()
        statuses = processes.ended(within=60)
        print(f"kill {kill}: process {which}, after it {time.monotonic() - started:.1f} s")
        assert statuses[which] == -signal.SIGKILL
        assert statuses[1 - which] not in (0, 130)
        assert processes.errors()[1 - which]

    processes, _ = ends_like_one_process(config, tmp_path)
    out = processes.outputs[0].read_text()
    assert "device     2 x cpu (cpu) of 2 processes" in out
    # One speaks; the other's runtime may greet.
    second = processes.outputs[1].read_text()
    assert "device " not in second and "done " not in second


@pytest.mark.extended
def test_sigterm_on_one_process_saves_on_all(corpus, tmp_path):
    config = long_run(
        TINY, corpus, out_dir=str(tmp_path / "run"), checkpoint_every=1000, mesh="fsdp=2,tensor=2"
    )
    processes = Processes(config, 4, tmp_path)
    processes.wait_for(7)
    processes.all[2].send_signal(signal.SIGTERM)
    assert processes.ended() == [130] * 4, processes.errors()
    out = processes.outputs[0].read_text()
    stopped = int(re.search(r"stopped    after step (\d+), checkpoint saved", out)[1])
    assert 7 <= stopped < 40
    assert [x["step"] for x in metrics(config)] == list(range(1, stopped + 1))
    # The run goes on with other processes, and on another mesh.
    config = dataclasses.replace(config, mesh="data=2,fsdp=2")
    processes = Processes(config, 2, tmp_path, devices=2)
    assert processes.ended() == [0, 0], processes.errors()
    assert f"resuming   after step {stopped}," in processes.outputs[0].read_text()
    whole = dataclasses.replace(config, out_dir=str(tmp_path / "whole"), mesh=None)
    one = Processes(whole, 1, tmp_path)
    assert one.ended() == [0], one.errors()
    assert_close(metrics(config), metrics(whole))


@pytest.mark.extended
def test_tasks_of_slurm_find_each_other(corpus, tmp_path):
    config = long_run(TINY, corpus, out_dir=str(tmp_path / "run"), steps=8, mesh="fsdp=2")
    processes = Processes(config, 2, tmp_path, cluster=True)
    assert processes.ended() == [0, 0], processes.errors()
    out = processes.outputs[0].read_text()
    assert "device     2 x cpu (cpu) of 2 processes" in out
    assert len(metrics(config)) == 8
    second = processes.outputs[1].read_text()
    assert "device " not in second and "done " not in second


@pytest.mark.extended
def test_silent_process_ends_the_others(corpus, tmp_path):
    """A stopped process is like a machine that is cut off: it closes no connection."""
    config = long_run(TINY, corpus, out_dir=str(tmp_path / "run"), steps=100_000)
    processes = Processes(config, 2, tmp_path)
    processes.wait_for(7)
    processes.all[1].send_signal(signal.SIGSTOP)
    processes.all[0].wait(60)
    processes.all[1].kill()
    assert processes.ended()[0] not in (0, 130)


@pytest.mark.extended
def test_different_settings_are_refused(corpus, tmp_path):
    config = long_run(TINY, corpus, out_dir=str(tmp_path / "run"))
    real, made = flags, iter(range(2))
    with replaced(sys.modules[__name__], "flags", lambda x: [*real(x), "--seed", str(next(made))]):
        processes = Processes(config, 2, tmp_path)
    assert not {0, 130} & set(processes.ended(within=90))
    assert "--seed must be the same in all processes; got other values in process 1" in "".join(
        processes.errors()
    )


# ---------------------------------------------------------------------------------------- the parts


def test_every_parameter_has_one_rule():
    model = nnx.eval_shape(lambda: Decoder(model_of(TINY), rngs=nnx.Rngs(0)))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    ]
    specs = {path: models.sharding.rule(path) for path in paths}
    assert len(paths) == 1 + 2 * 9 + 1
    assert specs["layers/1/attention/out/weight"] == P("fsdp", "tensor")
    with pytest.raises(ValueError, match=r"one line for each parameter; got .* for a/kernel"):
        models.sharding.rule("a/kernel")


def test_mesh_axes_left_out_have_one_device():
    sizes = {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 4}
    assert mesh_sizes("tensor=4,fsdp=2") == sizes


@pytest.mark.parametrize(
    ("mesh", "fragment"),
    [
        ("model=8", "must give axes of data, fsdp, sequence, tensor once, with a positive size"),
        ("data=4,,fsdp=2", "must give axes of"),
        ("data=0", "must give axes of"),
        ("data=4,data=2", "must give axes of"),
        ("data=4", "must multiply to the number of devices; got data=4, which is 4, and 8 devices"),
        (None, "batch_size / accumulation, 4, by data times fsdp; got data=8 (every device"),
        ("sequence=8", "must divide the run's context, 12, by sequence; got sequence=8, which"),
        ("data=2,tensor=4", "must divide the run's num_kv_heads, 2, by tensor; got"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(mesh, fragment, capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: DEVICES)
    assert main(flags(TINY, mesh=mesh)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("train: error: --mesh must ")
    assert fragment in error


@pytest.mark.parametrize(
    "arguments",
    ["--process-id 0", "--coordinator a:1 --num-processes 2", "--cluster --process-id 1"],
)
def test_process_flags_must_fit_each_other(arguments, capsys):
    assert main([*flags(TINY), *shlex.split(arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must be given together, or --cluster alone; got" in error


if __name__ == "__main__":
    name, data, out_dir = sys.argv[1:]
    globals()[name](dataclasses.replace(TINY, data=data, out_dir=out_dir))
