"""Fine-tuning: the model in a folder of published weights, with what `train_gpt.py` needs of it.

    runs/tuned/weights/    the tuned copy: config.json, safetensors and the tokenizer's files

Sequences are packed: a batch has windows of one stream of tokens, and the document of each token.
Attention does not cross documents, and positions start again in each.
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from models import Decoder, checkpoint
from models.config import DecoderConfig
from models.sharding import Layout
from scripts.training.processes import UserError, is_writer, say, warn

# Tokens of each sequence whose logits exist at once, at most: a vocabulary is large.
LOGITS_AT_ONCE = 256
# Folder of a run: the tuned copy.
WEIGHTS = "weights"
# Files that it has of the folder. No other file, because tuned copies are published.
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def weights_folder(folder: Path) -> Path | None:
    """Return a folder of weights: itself, or in a run that has tuned some; None without any."""
    inside = folder / WEIGHTS
    if (inside / checkpoint.CONFIG).is_file():
        return inside
    return folder if (folder / checkpoint.CONFIG).is_file() else None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model that is fine-tuned, as `GPTConfig` is one that is trained from random parameters.

    Attributes:
        decoder: The model's shape, by its config.json.
        context: Tokens of a sequence in training.
        dtype: As in `GPTConfig`, and so are the others.
    """

    decoder: DecoderConfig
    context: int
    dtype: str | None
    param_dtype: str
    attention: str | None
    remat: bool

    vocab_size = property(lambda self: self.decoder.vocab_size)
    num_layers = property(lambda self: self.decoder.num_layers)
    embed_dim = property(lambda self: self.decoder.features)
    num_heads = property(lambda self: self.decoder.num_heads)
    kv_heads = property(lambda self: self.decoder.num_kv_heads)
    head_dim = property(lambda self: self.decoder.head_dim)
    mlp_dim = property(lambda self: self.decoder.hidden)

    def __post_init__(self):
        if self.attention == "cudnn":
            raise ValueError(
                "`attention` must be an implementation of pallas_flash.attention for weights; got "
                "'cudnn'."
            )
        if self.decoder.rope is None and self.context > self.decoder.context:
            raise ValueError(
                f"`context` must be at most {self.decoder.context}, the learned positions of the "
                f"weights; got {self.context}."
            )

    def options(self, batch: int) -> dict[str, Any]:
        """Return shapes of the options of the first layer's attention."""
        decoder = self.decoder
        segment_ids = jax.ShapeDtypeStruct((batch, self.context), jnp.int32)
        return {
            "segment_ids": segment_ids,
            "local_window_size": (decoder.window - 1, 0) if decoder.has_window(0) else None,
            "logits_soft_cap": decoder.attention_soft_cap,
        }

    def functions(self, layout: Layout | None = None):
        """Return `init() -> params`, `loss_fn(params, batch) -> loss`, and the graph definition.

        A batch has tokens, and the document of each; without them a row is one document. The
        parameters of `init` are random, in the shapes that `read` gives.
        """
        config = dataclasses.replace(
            self.decoder,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            implementation=self.attention,
            remat=self.remat,
        )

        def make():
            return Decoder(config, rngs=nnx.Rngs(0), layout=layout)

        def loss_fn(params, batch):
            tokens, documents = batch if isinstance(batch, tuple) else (batch, None)
            return loss(nnx.merge(graphdef, params), tokens.astype(jnp.int32), documents)

        graphdef = nnx.graphdef(nnx.eval_shape(make))
        return lambda: nnx.to_pure_dict(nnx.state(make())), loss_fn, graphdef

    def read(self, path: str, layout: Layout | None = None):
        """Return the parameters in the folder, on their devices.

        Raises:
            UserError: A tensor is missing, unexpected, of another shape, or damaged.
        """
        folder = weights_folder(Path(path))
        try:
            model = Decoder.from_pretrained(folder, layout=layout, param_dtype=self.param_dtype)
        except ValueError as error:
            said = str(error).replace("`folder`", "`init_from`").replace("`layout`", "`mesh`")
            raise UserError(said) from None
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def save(self, path: str, params, out_dir: Path, layout: Layout):
        """Write the tuned copy, in the dtype of the folder, with its tokenizer; all processes call.

        Args:
            path: The folder that was tuned.
            params: The parameters.
            out_dir: The folder of the run.
            layout: The mesh.
        """
        source = weights_folder(Path(path))
        _, tensors = checkpoint.open_folder(source)
        dtype = checkpoint.embedding_dtype(self.decoder, tensors)

        @functools.partial(jax.jit, out_shardings=layout.sharding())
        def whole(x):
            return x.astype(dtype)

        # One array after the other, because no device need hold them all.
        params = jax.tree.map(lambda x: np.asarray(whole(x).addressable_data(0)), params)
        if not is_writer():
            return
        folder, new = out_dir / WEIGHTS, out_dir / f".{WEIGHTS}.train_gpt"
        shutil.rmtree(new, ignore_errors=True)
        checkpoint.write(new, self.decoder, params, max_file_bytes=5 * 10**9)
        for name in COPIED:
            # A link may lead to a file that is not for publishing.
            if (source / name).is_symlink():
                warn(f"the tuned copy has no {name}, because {source / name} is a symbolic link")
            elif (source / name).is_file():
                shutil.copy(source / name, new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        say("weights", f"the tuned copy is {folder}, in {dtype}")


def loss(
    model: Decoder, tokens: Int[Array, "B T+1"], documents: Int32[Array, "B T+1"] | None
) -> Float[Array, ""]:
    """Return the mean cross-entropy of each token given its window so far, in nats per token.

    Args:
        model: The model.
        tokens: Windows one longer than the model's input.
        documents: Number of each token's document; None: a window is one document.
    """
    given, next_ = tokens[:, :-1], tokens[:, 1:]
    stream = model.stream(given, segment_ids=None if documents is None else documents[:, :-1])
    (batch, length), features = given.shape, stream.shape[-1]
    size = max(n for n in range(1, LOGITS_AT_ONCE + 1) if length % n == 0)

    # The backward computes the logits again.
    @jax.checkpoint
    def add_part(total, part):
        x, wanted = part
        log_probs = jax.nn.log_softmax(model.logits(x))
        return total - jnp.sum(jnp.take_along_axis(log_probs, wanted[..., None], -1)), None

    parts = (
        stream.reshape(batch, -1, size, features).swapaxes(0, 1),
        next_.reshape(batch, -1, size).swapaxes(0, 1),
    )
    total, _ = jax.lax.scan(add_part, jnp.zeros((), jnp.float32), parts)
    return total / next_.size


def open_weights(path: str, **values) -> Tuned:
    """Return the model of a folder of weights, with the fields of `Tuned`.

    Raises:
        UserError: `Decoder` does not compute the model.
    """
    try:
        text = (weights_folder(Path(path)) / checkpoint.CONFIG).read_text(encoding="utf-8")
        return Tuned(DecoderConfig.from_json(text), **values)
    except ValueError as error:
        raise UserError(str(error)) from None
