"""A GPT in Flax with `pallas_flash` attention: a decoder-only transformer to train and sample.

    x = embedding[tokens]
    x = x + attention(norm(x))        causal, rotary positions, grouped-query if asked for
    x = x + swiglu(norm(x))           both repeated num_layers times
    logits = norm(x) @ embedding.T

There is no position table: `SelfAttention` rotates queries and keys (RoPE), so the last
`context` tokens of a longer text are as good an input as the first.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models.config import DecoderConfig
from models.decoder import Decoder
from models.generation import HOTTEST, Sampling, draw, most_likely, tempered
from models.layers import RMSNorm, SwiGLU, TiedEmbedding, fan_in_init
from models.sharding import Layout
from pallas_flash import save_residuals
from pallas_flash.flax import SelfAttention


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT and the dtypes of its computation.

    Attributes:
        vocab_size: Number of tokens; 256 for bytes.
        context: Longest input, in tokens.
        num_layers: Number of blocks, each of attention and an MLP.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads, a divisor of num_heads; None is num_heads.
        embed_dim: Size of the residual stream, a multiple of num_heads.
        mlp_ratio: Hidden size of the MLP over embed_dim, rounded up to a multiple of 64. SwiGLU
            has three matrices, so 8/3 costs what 4 does in a two-matrix MLP.
        rope_theta: Base of the rotary frequencies; None leaves positions out.
        dtype: Type of the activations; None is param_dtype.
        param_dtype: Type of the parameters.
        attention: The `implementation` of `pallas_flash.attention`; None for auto-selection.
        remat: Whether the backward computes a layer's activations again, to save memory. The
            residuals of attention are kept.
    """

    vocab_size: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    embed_dim: int = 128
    mlp_ratio: float = 8 / 3
    rope_theta: float | None = 10_000.0
    dtype: str | None = None
    param_dtype: str = "float32"
    attention: str | None = None
    remat: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "context", "num_layers", "num_heads", "num_kv_heads", "embed_dim")
        for name in (*sizes, "mlp_ratio", "rope_theta"):
            value = getattr(self, name)
            # NaN fails the comparison, too.
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive and finite; got {value}.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`embed_dim` must be a multiple of `num_heads`; got {self.embed_dim} and "
                f"{self.num_heads}."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of `num_kv_heads`; got {self.num_heads} and "
                f"{self.num_kv_heads}."
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(
                f"`embed_dim / num_heads` must be even, because rotary positions turn pairs; got "
                f"{self.embed_dim} / {self.num_heads} = {self.head_dim}."
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_dim(self) -> int:
        """Hidden size of the MLP."""
        return 64 * math.ceil(self.mlp_ratio * self.embed_dim / 64)

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtypes in the form of every layer's arguments."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class Block(nnx.Module):
    """One pre-norm transformer block: attention, then an MLP, each added to its input.

    Its arguments are as in `GPT`.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, attention_layer: type[SelfAttention]):
        kwargs = {**config.dtypes, "rngs": rngs}
        branches = 2 * config.num_layers
        self.attention_norm = RMSNorm(config.embed_dim, **kwargs)
        self.attention = attention_layer(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.kv_heads,
            is_causal=True,
            rope_theta=config.rope_theta,
            kernel_init=fan_in_init(config.embed_dim),
            out_kernel_init=fan_in_init(config.embed_dim, residual_branches=branches),
            implementation=config.attention,
            **kwargs,
        )
        self.mlp_norm = RMSNorm(config.embed_dim, **kwargs)
        self.mlp = SwiGLU(config.embed_dim, config.mlp_dim, residual_branches=branches, **kwargs)

    def __call__(
        self,
        x: Float[Array, "... T C"],
        positions: Int[Array, " T"] | None = None,
        *,
        decode: bool = False,
    ) -> Float[Array, "... T C"]:
        """Return the residual stream after this block."""
        where = {} if positions is None else {"positions": positions, "reordered": True}
        x = x + self.attention(self.attention_norm(x), decode=decode, **where)
        return x + self.mlp(self.mlp_norm(x))


@functools.partial(nnx.remat, policy=save_residuals)
def _computed_again(block, x, positions):
    return block(x, positions)


class GPT(nnx.Module):
    """Logits of the next token at every position of a text.

    Args:
        config: The model's shape.
        rngs: Source of the initial values.
        attention_layer: The class of the attention layers; a subclass may compute them otherwise.
        layout: The shardings of parameters and activations on several devices; None for one device.
            The parameters of a layer move to their devices as soon as they are made, so that no
            device ever holds the whole model.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        rngs: nnx.Rngs,
        attention_layer: type[SelfAttention] = SelfAttention,
        layout: Layout | None = None,
    ):
        kwargs = {**config.dtypes, "rngs": rngs}
        self.config, self.layout = config, layout

        def placed(part):
            if layout is not None:
                layout.place(part)
            return part

        self.embedding = placed(TiedEmbedding(config.vocab_size, config.embed_dim, **kwargs))
        blocks = [
            placed(Block(config, rngs=rngs, attention_layer=attention_layer))
            for _ in range(config.num_layers)
        ]
        self.blocks = nnx.List(blocks)
        self.norm = placed(RMSNorm(config.embed_dim, **kwargs))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " T"] | None = None,
        *,
        decode: bool = False,
    ) -> Float[Array, "B T vocab"]:
        """Return float32 logits; the logits at position t depend on tokens 0..t alone.

        Args:
            tokens: A text; for `decode`, the tokens that follow the decoded ones.
            positions: The position of each token in the text; None: in order.
            decode: Whether keys and values are cached for later tokens; call `init_cache` first.

        Raises:
            ValueError: The text is longer than the model's context.
        """
        if tokens.shape[-1] > self.config.context:
            raise ValueError(
                f"`tokens` must be no longer than the context; got {tokens.shape[-1]} tokens and "
                f"a context of {self.config.context}."
            )
        layer = functools.partial(Block.__call__, decode=decode)
        if self.config.remat and not decode:
            layer = _computed_again
        x = self._lay(self.embedding.encode(tokens))
        for block in self.blocks:
            x = self._lay(layer(block, x, positions))
        return self.embedding.decode(self.norm(x))

    def _lay(self, x):
        return x if self.layout is None else self.layout.stream(x)

    def init_cache(self, batch: int, length: int) -> None:
        """Make a cache in every layer for keys and values of `batch` texts of `length` tokens.

        Raises:
            ValueError: The texts are longer than the model's context.
        """
        if length > self.config.context:
            raise ValueError(
                f"`length` must be no longer than the context; got {length} and a context of "
                f"{self.config.context}."
            )
        for block in self.blocks:
            block.attention.init_cache((batch, length, self.config.embed_dim))


def loss(model: GPT, tokens: Int[Array, "B T+1"]) -> Float[Array, ""]:
    """Return the mean cross-entropy of each token given the earlier ones, in nats per token.

    Args:
        model: The model.
        tokens: Texts one longer than the model's input: the last token is only predicted.
    """
    given, next_ = tokens[:, :-1], tokens[:, 1:]
    order = None if model.layout is None else model.layout.order(given.shape[1])
    if order is not None:
        given, next_ = given[:, order], next_[:, order]
    log_probs = jax.nn.log_softmax(model(given, order).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, next_[..., None], axis=-1))


def generate(
    model: GPT,
    key: Key[Array, ""],
    prompt: Int[Array, "B P"],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "B P+num_tokens"]:
    """Continue each prompt by `num_tokens` tokens drawn from the model.

    The whole loop is one compiled function, compiled again only for another prompt shape,
    `num_tokens` or `top_k`. Up to the model's context, keys and values are cached and a token costs
    one token's work. Later tokens cost a forward pass over the last `context` tokens, because the
    caches of all layers above the first depend on tokens that have left the context. So does the
    first token after a prompt that is longer.

    Args:
        model: The model.
        key: A JAX random key; the same key gives the same tokens.
        prompt: Tokens to continue, at least one.
        num_tokens: The number of tokens to add.
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Draws only from this many most likely tokens; None draws from all.

    Raises:
        ValueError: The prompt is empty, or a number is out of range.
    """
    if prompt.shape[-1] < 1:
        raise ValueError(f"`prompt` must have at least one token; got shape {prompt.shape}.")
    if num_tokens < 0:
        raise ValueError(f"`num_tokens` must not be negative; got {num_tokens}.")
    Sampling(temperature, top_k)  # It raises if they are out of range.
    temperature = float(min(temperature, HOTTEST))
    graphdef, state = nnx.split(model)
    return _generate(graphdef, state, key, prompt, num_tokens, temperature, top_k)


@functools.partial(jax.jit, static_argnames=("graphdef", "num_tokens", "top_k"))
def _generate(graphdef, state, key, prompt, num_tokens, temperature, top_k):
    model = nnx.merge(graphdef, state)
    (batch, given), context = prompt.shape, model.config.context
    length = given + num_tokens

    def with_next(tokens, logits, end):
        warm = tempered(most_likely(logits, top_k), temperature)
        drawn = draw(warm, jax.random.fold_in(key, end), Sampling())
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        token = jnp.where(temperature > 0, drawn, best)
        return tokens.at[:, end].set(token.astype(tokens.dtype))

    tokens = jnp.pad(prompt, ((0, 0), (0, num_tokens)))
    until = min(length, context)
    if given < until:
        model.init_cache(batch, until - 1)
        if given > 1:
            model(prompt[:, :-1], decode=True)
        decoder, cache, parameters = nnx.split(model, nnx.Cache, ...)

        def add_by_cache(end, carry):
            tokens, cache = carry
            model = nnx.merge(decoder, cache, parameters)
            last = jax.lax.dynamic_slice_in_dim(tokens, end - 1, 1, axis=1)
            tokens = with_next(tokens, model(last, decode=True)[:, -1], end)
            return tokens, nnx.state(model, nnx.Cache)

        tokens, _ = jax.lax.fori_loop(given, until, add_by_cache, (tokens, cache))

    def add_by_window(end, tokens):
        window = jax.lax.dynamic_slice_in_dim(tokens, end - context, context, axis=1)
        return with_next(tokens, model(window)[:, -1], end)

    if length > context:
        tokens = jax.lax.fori_loop(max(given, context), length, add_by_window, tokens)
    return tokens


def as_decoder(config: GPTConfig, params) -> Decoder:
    """Return the `Decoder` that computes the same logits from the same parameters.

    Its family is llama, so that `save_pretrained` writes a folder that other libraries read.

    Args:
        config: The GPT's shape; `rope_theta` must not be None.
        params: Its parameters, as nested dictionaries.

    Raises:
        ValueError: The GPT has no positions.
    """
    if config.rope_theta is None:
        raise ValueError("`rope_theta` must be a number for `Decoder`; got None.")
    source = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
    }
    decoder = DecoderConfig.from_json(json.dumps(source))
    decoder = dataclasses.replace(decoder, **config.dtypes, implementation=config.attention)

    def matrix(x, outputs):
        return {"weight": x.reshape(-1, outputs).T}

    def layer(block):
        attention, heads = block["attention"], config.num_heads * config.head_dim
        kv_heads = config.kv_heads * config.head_dim
        sizes = {"query": heads, "key": kv_heads, "value": kv_heads, "out": config.embed_dim}
        mlp = {name: matrix(x["kernel"], x["kernel"].shape[1]) for name, x in block["mlp"].items()}
        return {
            "attention_norm": {"weight": block["attention_norm"]["scale"]},
            "attention": {n: matrix(attention[n]["kernel"], size) for n, size in sizes.items()},
            "mlp_norm": {"weight": block["mlp_norm"]["scale"]},
            "mlp": mlp,
        }

    return nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))),
        {
            "embedding": {"weight": params["embedding"]["embedding"]},
            "layers": {int(n): layer(block) for n, block in params["blocks"].items()},
            "norm": {"weight": params["norm"]["scale"]},
        },
    )
