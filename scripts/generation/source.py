"""The model of `generate.py`: from a folder of weights, which the folder of a run has, too."""

import contextlib
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType

from models import Decoder
from models.checkpoint import weights_folder
from models.errors import UserError, is_out_of_memory
from models.sharding import AXES, Layout
from models.tokens import Bytes, FromFolder, read_json

# Arguments in messages of `models`, and what the command line has for them.
FLAGS = {
    **{"temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p"},
    **{"prompts": "--prompt", "implementation": "--attention", "layout": "--devices"},
    **{"folder": "RUN_OR_FOLDER", "when_full": "--when-full", "keep": "--system"},
    **{"drafts": "--drafts", "draft": "--draft", "batch_invariant": "--batch-invariant"},
}
# Fields of generation_config.json, where it says that tokens are drawn.
DRAWN = ("temperature", "top_k", "top_p", "min_p")
# Fields of it that change which tokens are drawn, and that nothing here reads.
NOT_READ = ("repetition_penalty", "no_repeat_ngram_size", "typical_p", "num_beams", "bad_words_ids")


@dataclasses.dataclass(frozen=True)
class Source:
    """A model and its tokens.

    Attributes:
        model: The model.
        tokens: Its tokenizer.
        defaults: Values of flags that are not given.
        name: The model in a few words.
    """

    model: Decoder
    tokens: Bytes | FromFolder
    defaults: dict[str, Any]
    name: str


def message_with_flags(error: Exception) -> str:
    """Return the first line of a message, with flags where it has arguments."""
    return re.sub(rf"`({'|'.join(FLAGS)})`", lambda x: FLAGS[x[1]], str(error).splitlines()[0])


@contextlib.contextmanager
def explained(too_large: str) -> Iterator[None]:
    """Turn the errors of a model into sentences with flags; `too_large` is the one for memory.

    Raises:
        UserError: There was an error.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise UserError(message_with_flags(error)) from None
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(too_large) from None


def make_layout(devices: int) -> Layout | None:
    """Return the mesh on which several devices share heads and hidden units; None for one device.

    Raises:
        UserError: There are fewer devices.
    """
    if devices > jax.local_device_count():
        raise UserError(
            f"--devices must be at most {jax.local_device_count()}, which JAX shows; got {devices}."
        )
    sizes = [devices if axis == "tensor" else 1 for axis in AXES]
    chosen, kinds = jax.local_devices()[:devices], (AxisType.Auto,) * len(AXES)
    if devices == 1:
        return None
    return Layout(jax.make_mesh(sizes, AXES, axis_types=kinds, devices=chosen))


def open_source(
    folder: pathlib.Path,
    dtype: str | None,
    attention: str | None,
    devices: int = 1,
    flag: str = "RUN_OR_FOLDER",
) -> Source:
    """Return the model of a run or of a folder of weights.

    Args:
        folder: The folder.
        dtype: Type of the activations; None is the type of the weights.
        attention: As `implementation` of `pallas_flash.attention`.
        devices: Number of devices that share a folder's weights.
        flag: What the command line calls the folder.

    Raises:
        UserError: The folder is neither, or is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{flag} must be a folder; got {folder}.")
    layout, weights = make_layout(devices), weights_folder(folder)
    if weights is None and (folder / "checkpoints").exists():
        raise UserError(f"{folder} must have weights/, which a run writes when it ends; got none.")
    folder = weights or folder
    with explained(
        f"the weights must fit the device's memory; got {folder}: share them by --devices."
    ):
        model = Decoder.from_pretrained(
            folder, layout=layout, dtype=dtype, implementation=attention
        )
        if model.config.num_kv_heads % devices:
            heads = model.config.num_kv_heads
            raise UserError(f"--devices must divide {heads} key/value heads; got {devices}.")
    generation = read_json(folder / "generation_config.json")
    defaults = {name: generation[name] for name in DRAWN if generation.get(name) is not None}
    # Other libraries take 0 for "all tokens".
    defaults = {name: x for name, x in defaults.items() if x or name == "temperature"}
    if left := [name for name in NOT_READ if generation.get(name) not in (None, 0, 1)]:
        asked = ", ".join(left)
        print(f"{folder}/generation_config.json asks for {asked}: not applied", file=sys.stderr)
    family = json.loads(model.config.source or "{}")["model_type"]
    defaults = defaults if generation.get("do_sample") else {}
    # Runs whose tokens are bytes have no tokenizer.
    of_bytes = model.config.vocab_size == 256 and not (folder / "tokenizer.json").exists()
    return Source(model, Bytes() if of_bytes else FromFolder(folder), defaults, family)
