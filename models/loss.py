"""The loss of `Decoder`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from models.decoder import SMALL, Decoder

# Tokens of each sequence whose logits exist at once, at most, if the vocabulary is large.
LOGITS_AT_ONCE = 256


def next_token_loss(
    model: Decoder, tokens: Int[Array, "B T+1"], documents: Int32[Array, "B T+1"] | None = None
) -> Float[Array, ""]:
    """Return the mean cross-entropy of each token given its document so far, in nats per token.

    Args:
        model: The model.
        tokens: Texts one longer than the model's input: the last token is only predicted.
        documents: Number of each token's document; None: a text is one document.
    """
    given, next_ = tokens[:, :-1], tokens[:, 1:]
    documents = None if documents is None else documents[:, :-1]
    order = None if model.layout is None else model.layout.order(given.shape[1])
    if order is not None:
        given, next_ = given[:, order], next_[:, order]
        documents = None if documents is None else documents[:, order]
    stream = model.stream(given, segment_ids=documents, order=order)
    if model.config.vocab_size <= SMALL:
        return _surprise(model.logits(stream), next_) / next_.size
    (batch, length), features = given.shape, stream.shape[-1]
    size = max(n for n in range(1, LOGITS_AT_ONCE + 1) if length % n == 0)

    # The backward computes the logits again.
    @jax.checkpoint
    def add_part(total, part):
        x, wanted = part
        return total + _surprise(model.logits(x), wanted), None

    parts = (
        stream.reshape(batch, -1, size, features).swapaxes(0, 1),
        next_.reshape(batch, -1, size).swapaxes(0, 1),
    )
    total, _ = jax.lax.scan(add_part, jnp.zeros((), jnp.float32), parts)
    return total / next_.size


def _surprise(logits, wanted) -> Float[Array, ""]:
    """Return the sum of the negative log-probabilities of the wanted tokens."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.take_along_axis(log_probs, wanted[..., None], -1))
