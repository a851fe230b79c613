"""Folders of weights that a run leaves, or `python -m models.export`: whole, with a tokenizer."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import checkpoint
from models.config import DecoderConfig
from models.errors import naming
from models.training.files import END, TOKENIZER, sha256_of
from models.training.settings import TrainConfig

# Files that the weights have of the folder that was tuned. No other file, because they are
# published.
COPIED = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", END),
)


def dtype_of(config: TrainConfig, model: DecoderConfig) -> str:
    """Return the dtype of a run's weights: tuned ones have the dtype of their folder."""
    if config.init_from is None:
        return model.param_dtype
    return checkpoint.embedding_dtype(model, checkpoint.open_folder(config.weights)[1])


def hashes_of(config: TrainConfig) -> list[str] | None:
    """Return hashes by which a run knows the weights that it tunes; None without any.

    They are of config.json, and of the weights where checkpoints have an adapter alone.
    """
    if config.init_from is None:
        return None
    tensors = sorted(config.weights.glob("*.safetensors")) if config.lora_rank else []
    return [sha256_of(path) for path in (config.weights / checkpoint.CONFIG, *tensors)]


def tokenizer_files(source: Path | None) -> list[Path]:
    """Return the files of a folder that its copy has, too: of weights, or of prepared tokens."""
    return [] if source is None else [source / name for name in COPIED if (source / name).is_file()]


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Give a new folder that takes the place of one; a kill leaves the old one, or none."""
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with naming(folder):
            yield new
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_weights(folder: Path, model: DecoderConfig, params: Any, copied: list[Path]) -> list[str]:
    """Write weights, and files beside them, into a folder; one that is there is replaced.

    A kill or a full disk leaves the old folder, or none.

    Returns:
        What was not copied, and why.
    """
    left_out = []
    with replaced(folder) as new:
        checkpoint.write(new, model, params, max_file_bytes=5 * 10**9)
        for path in copied:
            # A link may lead to a file that is not for publishing.
            if path.is_symlink():
                left_out.append(
                    f"the weights have no {path.name}, because {path} is a symbolic link"
                )
            else:
                shutil.copy(path, new)
    return left_out
