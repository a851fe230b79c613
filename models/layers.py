"""The small parts of the GPT: initialisation, the norm, the MLP and the token embedding."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def fan_in_init(fan_in: int, *, residual_branches: int = 1) -> jax.nn.initializers.Initializer:
    """Return a normal initialisation whose output has the variance of its input, or a share of it.

    Layers that write to the residual stream need the share: a sum of `n` independent branches, each
    `1/sqrt(n)` as large, has the same variance at every depth (GPT-2, section 2.3).

    Args:
        fan_in: The number of inputs that each output sums over.
        residual_branches: The number of branches that the residual stream sums; 1 for inner layers.
    """
    return nnx.initializers.normal((fan_in * residual_branches) ** -0.5)


class RMSNorm(nnx.RMSNorm):
    """`x / rms(x) * scale` over the last axis (Zhang and Sennrich, arXiv:1910.07467).

    Parameters and arguments are as in `nnx.RMSNorm`. The operations have this order, and the
    forward keeps `x` alone, so that XLA makes the forward one kernel that reads `x` once. The
    backward computes a row's rms again, in the kernel that reads `x` for the row's other sum.
    """

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Normalise each position on its own, with float32 sums."""
        x = x.astype(self.dtype or self.param_dtype)
        return rms_normalize(x, self.scale[...], self.epsilon)


def _normalized(x, scale, epsilon):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (wide * jax.lax.rsqrt(square + epsilon) * scale).astype(x.dtype)


rms_normalize = jax.custom_vjp(_normalized, nondiff_argnums=(2,))


def _normalize_forward(x, scale, epsilon):
    return _normalized(x, scale, epsilon), (x, scale)


def _normalize_backward(epsilon, residuals, cotangent):
    x, scale = residuals
    # Without the barrier, XLA finds that the forward has the same sum of squares, and keeps it. The
    # extra axis avoids a copy of `x` where the residual stream adds to it.
    x = jax.lax.optimization_barrier(x[None])[0]
    _, transpose = jax.vjp(functools.partial(_normalized, epsilon=epsilon), x, scale)
    return transpose(cotangent)


rms_normalize.defvjp(_normalize_forward, _normalize_backward)


class SwiGLU(nnx.Module):
    """The gated MLP `down(silu(gate(x)) * up(x))` (Shazeer, arXiv:2002.05202).

    Args:
        features: Size of the input and of the output.
        hidden: Size between the two matrix products.
        residual_branches: See `fan_in_init`; this layer's output is one of the branches.
        dtype: Type of the computation.
        param_dtype: Type of the parameters.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        residual_branches: int,
        dtype: str | None,
        param_dtype: str,
        rngs: nnx.Rngs,
    ):
        kwargs = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        into, out = fan_in_init(features), fan_in_init(hidden, residual_branches=residual_branches)
        self.gate = nnx.Linear(features, hidden, kernel_init=into, **kwargs)
        self.up = nnx.Linear(features, hidden, kernel_init=into, **kwargs)
        self.down = nnx.Linear(hidden, features, kernel_init=out, **kwargs)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Apply the MLP to each position on its own."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class TiedEmbedding(nnx.Module):
    """One matrix `[vocab_size, features]` that reads tokens and predicts them.

    Args:
        vocab_size: Number of tokens.
        features: Size of a token's vector.
        dtype: Type of the vectors, and of the inputs of the output product.
        param_dtype: Type of the parameters.
        rngs: Source of the initial values.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        dtype: str | None,
        param_dtype: str,
        rngs: nnx.Rngs,
    ):
        # GPT-2's 0.02: the first prediction is then nearly uniform, which no fan-in rule gives to a
        # matrix that is both the first and the last.
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, features), param_dtype))
        self.dtype = dtype or param_dtype

    def encode(self, tokens: Int[Array, "..."]) -> Float[Array, "... C"]:
        """Return the vector of each token: the product of a one-hot row with the matrix.

        A lookup gives the same bits, but its gradient adds one row for each token of the text to
        the matrix, in this dtype and in any order. If most bytes are one of a few letters, these
        additions wait for each other on a GPU. The product sums in float32, and costs as much as
        the logits do.
        """
        matrix = self.embedding[...].astype(self.dtype)
        one_hot = jax.nn.one_hot(tokens, len(matrix), dtype=self.dtype)
        return jnp.dot(one_hot, matrix, precision="highest")  # Not rounded to TF32.

    def decode(self, x: Float[Array, "... C"]) -> Float[Array, "... vocab"]:
        """Return the logits of the next token, accumulated in float32.

        Half-precision logits would be rounded to 0.03 near 8, which changes the loss.
        """
        matrix = self.embedding[...].astype(self.dtype)
        return jnp.dot(x.astype(self.dtype), matrix.T, preferred_element_type=jnp.float32)
