"""The loss of `Decoder`."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Int32

from models.decoder import SMALL, Decoder

# Tokens of each sequence whose logits exist at once, at most, if the vocabulary is large.
LOGITS_AT_ONCE = 256


def next_token_loss(
    model: Decoder,
    tokens: Int[Array, "B T+1"],
    documents: Int32[Array, "B T+1"] | None = None,
    answers: Bool[Array, "B T+1"] | None = None,
) -> Float[Array, ""]:
    """Return the mean cross-entropy of each token given its document so far, in nats per token.

    See `summed_loss`.
    """
    total, count = summed_loss(model, tokens, documents, answers)
    return total / count


def summed_loss(
    model: Decoder,
    tokens: Int[Array, "B T+1"],
    documents: Int32[Array, "B T+1"] | None = None,
    answers: Bool[Array, "B T+1"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of the cross-entropies, and how many tokens carry loss.

    Args:
        model: The model.
        tokens: Texts one longer than the model's input: the last token is only predicted.
        documents: Number of each token's document; None: a text is one document.
        answers: Whether each token carries loss; None: all do that are predicted.
    """
    given, wanted = tokens[:, :-1], tokens[:, 1:]
    carries = jnp.ones(wanted.shape) if answers is None else answers[:, 1:].astype(jnp.float32)
    documents = None if documents is None else documents[:, :-1]
    order = None if model.layout is None else model.layout.order(given.shape[1])
    if order is not None:
        given, wanted, carries = (x[:, order] for x in (given, wanted, carries))
        documents = None if documents is None else documents[:, order]
    stream = model.stream(given, segment_ids=documents, order=order)

    def loss(stream, wanted, carries):
        entropy = optax.softmax_cross_entropy_with_integer_labels(model.logits(stream), wanted)
        return jnp.sum(entropy * carries)

    if model.config.vocab_size <= SMALL:
        return loss(stream, wanted, carries), jnp.sum(carries)
    batch, length = given.shape
    size = max(n for n in range(1, LOGITS_AT_ONCE + 1) if length % n == 0)

    # The backward computes the logits again.
    @jax.checkpoint
    def add_part(total, part):
        return total + loss(*part), None

    def cut(x):
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    parts = cut(stream), cut(wanted), cut(carries)
    total, _ = jax.lax.scan(add_part, jnp.zeros((), jnp.float32), parts)
    return total, jnp.sum(carries)
