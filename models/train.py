"""Train a model, or tune published weights: `python -m models.train`.

    pip install -e '.[train]'
    python -m models.train --preset gpt2-small                       # a new model, 85 M parameters
    python -m models.train --init-from Qwen2.5-0.5B --data tokens/   # fine-tuning
    python -m models.train --init-from Qwen2.5-0.5B-Instruct --conversations chats.jsonl
    python -m models.train --mesh data=2,fsdp=2,sequence=2,tensor=2  # several devices

`docs/training.md` is about it; `scripts/train_gpt.py` is the small one, to read and to copy. Before
training, it compares the gradient of every parameter with the gradient through dense attention.

The same command resumes a run that was stopped or killed, at its last undamaged checkpoint and to
the same bits: the only state is (step, parameters, optimizer), because a batch is a function of
(seed, step).

`models/training/` has, in reading order, `loop.py` (updates, gradient check, the run),
`settings.py` (flags and presets), `text.py` and `conversations.py` (data), `mesh.py` (several
devices), `processes.py` (several processes, signals), `folder.py`, `files.py` and `weights.py`, and
`report.py`.
"""

import math
import re
import shlex
import signal
import sys
import time
import traceback

try:
    import jax

    from models.errors import is_out_of_memory
    from models.training import processes
    from models.training.loop import train
    from models.training.processes import UserError, fail, say
    from models.training.report import bits_of
    from models.training.settings import TrainConfig, config_from_flags, make_parser
except ModuleNotFoundError as error:
    raise SystemExit(
        "train: error: this command needs a checkout installed with its `train` extra; got no "
        f"module named {error.name!r}: run pip install -e '.[train]'."
    ) from None


def with_flags(message: object) -> str:
    """Return a message with flags where it has settings: --batch-size for `batch_size`."""
    names = {*processes.FLAGS, *TrainConfig.__dataclass_fields__}

    def flag(match):
        return f"--{match[1].replace('_', '-')}" if match[1] in names else match[0]

    return re.sub(r"`(\w+)`", flag, str(message))


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    start = time.perf_counter()
    parser = make_parser((__doc__ or "").partition("\n")[0])
    processes.add_process_flags(parser)
    flags = vars(parser.parse_args(argv))
    which = {name: flags.pop(name) for name in processes.FLAGS if name in flags}
    command = shlex.join(["python", "-m", "models.train", *argv])
    config = None
    try:
        config = config_from_flags(flags)
        processes.join(which)
        result = train(config)
    except UserError as error:
        fail(with_flags(error))
        return 2
    except BrokenPipeError:
        # As under `| head`.
        fail(f"what reads the output has ended, and so has the run; continue with: {command}")
        return 128 + signal.SIGPIPE
    except OSError as error:
        fail(f"reading or writing failed: {error}: repair this, then run the same command again.")
        return 2
    except jax.errors.JaxRuntimeError as error:
        if config is None or not is_out_of_memory(error):
            raise
        fail(
            f"--batch-size must fit the device's memory; got {config.microbatch} sequences of "
            f"{config.context} tokens at once, for which it could not allocate the memory of a "
            "program: raise --accumulation, or choose a smaller model."
        )
        return 2
    except KeyboardInterrupt:
        say("stopped", f"at once, without a new checkpoint; continue with: {command}")
        return 130
    if result.interrupted:
        say("stopped", f"after step {result.step}, checkpoint saved; resume with: {command}")
        processes.finish()
        return 130
    # Damaged metrics may have lost them.
    loss, held_out = (math.nan if x is None else x for x in (result.loss, result.val_loss))
    speed = "" if result.speed is None else f", {result.speed}"
    say(
        "done",
        f"step {result.step}: loss {loss:.4f}, held out {held_out:.4f} nats per token"
        f"{bits_of(result.bits_per_byte)}{speed}; {time.perf_counter() - start:.0f} s in all; "
        f"text: python scripts/generate.py {config.out_dir}",
    )
    processes.finish()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # Python would print the error, and then wait for the other processes.
        traceback.print_exc()
        status = 1
    sys.exit(processes.leave(status))
