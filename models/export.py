"""Write the weights of a run, or of a folder, for other libraries: `python -m models.export`.

    python -m models.export runs/tuned tuned/                    # the checkpoint of lowest loss
    python -m models.export runs/tuned tuned-100/ --step 100
    python -m models.export Llama-3.2-1B tuned/ --adapter adapter/

The new folder has config.json and safetensors in the layout of the family, as `transformers` reads
it, and the tokenizer, the chat template and generation_config.json of the weights or the tokens
that the run began with. A model that was trained from nothing is a Llama. The adapter of a run with
--lora-rank is added to the weights that it tunes. A run may go on meanwhile.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

try:
    import absl.logging
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    from models import Decoder, checkpoint, lora
    from models.errors import UserError
    from models.training.files import RUN, TOKENIZER, read_marked
    from models.training.folder import CHECKPOINTS, CHECKSUMS, METRICS, STATE, damage_of
    from models.training.processes import first_line, say
    from models.training.settings import TrainConfig, model_config
    from models.training.text import TOKENS
    from models.training.weights import dtype_of, hashes_of, tokenizer_files, write_weights
except ModuleNotFoundError as error:
    raise SystemExit(
        "export: error: this command needs a checkout installed with its `train` extra; got no "
        f"module named {error.name!r}: run pip install -e '.[train]'."
    ) from None

import numpy as np


def chosen_step(run: Path, step: int | None) -> int:
    """Return the step of a whole checkpoint: the given one, or the one of lowest held-out loss.

    Without a look at the held-out text, it is the last.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
    """
    folders = (x for x in (run / CHECKPOINTS).glob("*") if x.name.isdecimal())
    steps = sorted(int(x.name) for x in folders if (x / CHECKSUMS).exists())
    if not steps:
        raise UserError(f"SOURCE must have a checkpoint; got {str(run)!r} without one.")
    if step is None:
        looks = []
        for line in (run / METRICS).read_bytes().split(b"\n") if (run / METRICS).exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                content = json.loads(line)
                looks.append((float(content["val_loss"]), content["step"]))
        step = min((x for x in looks if x[1] in steps), default=(0, steps[-1]))[1]
    if step not in steps:
        raise UserError(f"--step must be one of {', '.join(map(str, steps))}; got {step}.")
    if damage := damage_of(run / CHECKPOINTS / str(step)):
        raise UserError(
            f"the checkpoint of step {step} must be whole; got {damage}: choose another --step "
            f"of {', '.join(str(x) for x in steps if x != step) or 'another run'}."
        )
    return step


def read_params(run: Path, step: int) -> Any:
    """Return the parameters of a checkpoint as arrays of NumPy, without the optimizer's state."""
    path = (run / CHECKPOINTS / str(step) / STATE).absolute()
    absl.logging.set_verbosity(absl.logging.FATAL)
    try:
        with ocp.PyTreeCheckpointer() as reader:
            tree: Any = reader.metadata(path).item_metadata
            item = {"params": tree["params"]}
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            how = ocp.args.PyTreeRestore(item=item, restore_args=kinds, partial_restore=True)
            return reader.restore(path, args=how)["params"]
    except Exception as error:  # Orbax raises many types, and no type for another version.
        raise UserError(
            "SOURCE must have checkpoints that this version of orbax reads; got "
            f"{first_line(error)!r} at step {step}."
        ) from error


def of_run(run: Path, settings: dict[str, Any], step: int):
    """Return the model's configuration and parameters, their dtype, and the tokenizer's folder."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    config = TrainConfig(**{name: settings[name] for name in names if name in settings})
    lost = config.init_from and not checkpoint.weights_folder(Path(config.init_from))
    if config.init_from and (lost or hashes_of(config) != settings.get("weights")):
        if config.lora_rank or not checkpoint.weights_folder(run):
            raise UserError(
                f"SOURCE must have the weights that it tuned in {config.init_from!r}, as it found "
                f"them; got {'none' if lost else 'others'} there: put them back."
            )
        # The copy that the run has written has their shape and tokenizer, too.
        config = dataclasses.replace(config, init_from=str(run / "weights"))
    params = read_params(run, step)
    vocab_size = 1 if config.init_from else len(params["embedding"]["weight"])
    model = model_config(config, vocab_size)
    dtype = dtype_of(config, model)
    if config.lora_rank:
        base = nnx.to_pure_dict(nnx.state(Decoder.from_pretrained(config.weights), nnx.Param))
        base = jax.tree.map(np.asarray, base)
        params = lora.merged(model, base, params, config.alpha, dtype)
    source = run / "weights"
    if config.init_from:
        source = config.weights
    elif config.data and read_marked(Path(config.data) / TOKENS):
        source = Path(config.data)
    return model, params, dtype, source


def of_folder(folder: Path, adapter: Path | None):
    """Return the same of a folder of weights, with an adapter added."""
    model = Decoder.from_pretrained(folder)
    config, params = model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if adapter is not None:
        added, alpha = lora.load(adapter, config, params)
        params = lora.merged(config, params, added, alpha, config.param_dtype)
    return config, params, config.param_dtype, folder


def export(source: Path, folder: Path, step: int | None, adapter: Path | None) -> None:
    """Write the folder; see the module."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"FOLDER must be new or empty; got {str(folder)!r}, which has content.")
    settings = read_marked(source / RUN)
    weights = checkpoint.weights_folder(source)
    if settings is None and weights is None:
        raise UserError(
            f"SOURCE must be the folder of a run of models.train, or one with "
            f"{checkpoint.CONFIG}; got {str(source)!r}."
        )
    for name, x, wanted in (("--step", step, settings), ("--adapter", adapter, not settings)):
        if x is not None and not wanted:
            kind = "a run of models.train" if name == "--step" else "weights that are no run"
            raise UserError(f"{name} must come with {kind} as SOURCE; got {str(source)!r}.")
    if settings is not None:
        step = chosen_step(source, step)
        model, params, dtype, copied = of_run(source, settings, step)
    else:
        assert weights is not None  # refused above
        model, params, dtype, copied = of_folder(weights, adapter)
    params = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
    files = tokenizer_files(copied)
    for line in write_weights(folder.absolute(), model, params, files):
        print(f"export: warning: {line}", file=sys.stderr)
    of_step = "" if step is None else f"of step {step} "
    kind = json.loads(model.source or "{}").get("model_type")
    say("weights", f"{of_step}are in {folder}: {kind}, in {dtype}")
    if not any(x.name == TOKENIZER for x in files):
        say("tokenizer", "none, because the source has none")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    title, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m models.export",
        description=title + usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a run, or a folder of weights")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    parser.add_argument(
        "--step", type=int, help="a checkpoint; by default the one of the lowest loss"
    )
    parser.add_argument("--adapter", type=Path, help="folder of an adapter by peft, to add")
    flags = parser.parse_args(argv)
    place = contextlib.nullcontext()
    with contextlib.suppress(RuntimeError):  # JAX may have been told to use accelerators alone
        place = jax.default_device(jax.local_devices(backend="cpu")[0])
    try:
        with place:
            export(**vars(flags))
    except (ValueError, OSError) as error:
        print(f"export: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
