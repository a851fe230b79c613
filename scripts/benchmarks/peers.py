"""The attentions that `bench_attention.py` compares, each called in its own best way.

`PEERS` maps a name to a function of a `Shape` that returns an `Attend` (a function of JAX arrays)
or, for PyTorch, a `TorchAttend`. It raises `Unserved`, or `ImportError`, where the peer does not
compute that shape or is not installed. Errors that a peer raises later count as reasons, too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from scripts.benchmarks.shapes import Shape

# The most scores for which peers are timed that hold several arrays of scores, or that are slow on
# a GPU because they are our implementations for other devices.
MAX_DENSE_SCORES = 5e9
MAX_PORTABLE_SCORES = 2e8


class Unserved(Exception):
    """A peer does not compute a shape; the message says why."""


@dataclasses.dataclass(frozen=True)
class Attend:
    """A function of JAX arrays, and how its arguments differ from the common ones.

    Attributes:
        call: (q, k, v, **arrays) -> o, differentiable if the peer has a backward.
        arrays: Further arguments.
        dtype: The dtype of the computation, if it is not the dtype of the shape.
        heads_first: Whether its arrays are [B, N, T, D] and not [B, T, N, D].
        has_scale: Whether it multiplies the scores by 1 / sqrt(D); if not, q is multiplied before.
        search: Whether XLA is to search for its fastest products on a GPU.
    """

    call: Callable[..., jax.Array]
    arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    heads_first: bool = False
    has_scale: bool = True
    search: bool = True

    def to_peer(self, shape: Shape, name: str, x: jax.Array) -> jax.Array:
        """Convert one of q, k, v and do to the peer's form."""
        if name == "q" and not self.has_scale:
            x = x * jnp.asarray(shape.scale, x.dtype) if self.dtype is None else x * shape.scale
        x = x.astype(self.dtype or shape.dtype)
        return x.swapaxes(1, 2) if self.heads_first else x

    def from_peer(self, shape: Shape, name: str, x: jax.Array) -> jax.Array:
        """Convert a result to the common form, in float32."""
        x = x.astype(jnp.float32)
        if name == "dq" and not self.has_scale:
            x = x * shape.scale
        first = self.heads_first and name in ("o", "dq", "dk", "dv")
        return x.swapaxes(1, 2) if first else x


@dataclasses.dataclass(frozen=True)
class TorchAttend:
    """(q, k, v) -> o on torch tensors [B, N, T, D] that lie in memory as [B, T, N, D]."""

    call: Callable[..., Any]


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise Unserved(reason)


def _only(shape: Shape, *served: str) -> None:
    """Refuse features of the shape that are not `served`, see `Shape.features` and `OPTIONS`."""
    for feature in shape.features:
        _refuse(feature not in served, f"has no {feature}")


def _not_too_dense(shape: Shape) -> None:
    _refuse(
        shape.scores > MAX_DENSE_SCORES,
        f"is dense: the scores alone would take {4e-9 * shape.scores:.0f} GB",
    )


def _only_causal_segments(shape: Shape) -> None:
    # The calls below give the first key of each query, and no last one.
    _refuse(shape.documents is not None and not shape.causal, "is timed on causal segments only")


def _window(shape: Shape) -> tuple[int, int] | None:
    return None if shape.window is None else (shape.window - 1, 0)


# ------------------------------------------------------------------------------------------------
# JAX.


def _ours(implementation: str | None, shape: Shape, direction: str, **options: Any) -> Attend:
    kernels = ("mosaic", "triton", *([None] if jax.default_backend() == "gpu" else []))
    if implementation not in kernels and not options:
        _refuse(shape.scores > MAX_PORTABLE_SCORES, "is timed on small shapes only")
    call = functools.partial(
        pallas_flash.attention,
        is_causal=shape.causal,
        local_window_size=_window(shape),
        implementation=implementation,
        logits_soft_cap=shape.soft_cap,
        dropout_rate=shape.dropout_rate,
        **options,
    )
    return Attend(call, shape.arrays())


def trusted(shape: Shape) -> Attend:
    """Return the reference of every peer: our "xla" in IEEE float32, with memory linear in T."""
    attend = _ours("xla", shape, "backward", precision="highest")
    # Nobody times the reference, and the search takes minutes.
    return dataclasses.replace(attend, dtype="float32", search=False)


def _jax_nn(implementation: str, shape: Shape, direction: str) -> Attend:
    _only(shape, "grouped heads", "window", "lengths", "bias", "trained bias", "mask array")
    if implementation == "xla":
        _not_too_dense(shape)
    call = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=shape.causal,
        local_window_size=_window(shape),
        implementation=implementation,
    )
    return Attend(call, shape.arrays())


def _jax_mha(shape: Shape, direction: str) -> Attend:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    _only(shape, "segment ids", "lengths")
    _refuse(shape.T != shape.S, "is for T = S")
    # The default tile of the backward is 32. Larger tiles of the forward do not fit for D = 256.
    blocks = attention.BlockSizes(128, 64 if shape.D > 128 else 128, 64, 64, 64, 64)
    ids = shape.segment_ids()
    if shape.lengths:  # Padding is a sequence of its own.
        ids = (np.arange(shape.T) >= shape.each_length()[:, None]).astype(np.int32)

    def call(q, k, v, segment_ids=None):
        return attention.mha(
            q, k, v, segment_ids, sm_scale=shape.scale, causal=shape.causal, block_sizes=blocks
        )

    return Attend(call, {} if ids is None else {"segment_ids": ids})


def _jax_mosaic(shape: Shape, direction: str) -> Attend:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    _only(shape, "grouped heads")
    _refuse(shape.dtype == "float32", "is for 16 bits")
    _refuse(shape.causal and direction == "backward", "has no causal backward")
    _refuse(bool(shape.T % 128 or shape.S % 128), "is for multiples of 128")
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=64 if shape.D > 128 else 128,
        max_concurrent_steps=2,
        causal=shape.causal,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    call = functools.partial(attention_mgpu.attention, config=config)
    return Attend(call, dtype="float16", has_scale=False)


# ------------------------------------------------------------------------------------------------
# tokamax. Its tuned configurations are listed by card, for "H100" and not for an H200, so that this
# file repeats the configurations of the same problems.


def _import_tokamax():
    if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
        # tokamax imports this for its own benchmarks, which nothing here calls.
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
    from tokamax._src.ops import attention

    return attention


def _tokamax(op: Any, mask_class: Any, shape: Shape) -> Attend:
    _refuse(shape.option == "sinks", "has no sinks")
    _refuse(shape.chosen is not None, "has no block-sparse mask")
    _refuse(shape.option == "ALiBi", "has ALiBi as a bias alone")
    _refuse(shape.option == "dropout", "takes a mask of what is dropped")
    _only_causal_segments(shape)
    arrays = {name: x for name, x in shape.arrays().items() if name in ("bias", "mask")}
    if (first := shape.first_keys()) is not None:
        arrays["k_start"] = first[:, None]
    if shape.lengths:
        rows = (shape.B, 1, shape.T)
        arrays["k_end"] = np.broadcast_to(shape.each_length()[:, None, None], rows)

    def call(q, k, v, bias=None, mask=None, k_start=None, k_end=None):
        mask = mask_class(mask, k_start=k_start, k_end=k_end, is_causal=shape.causal)
        return op(q, k, v, bias=bias, logits_soft_cap=shape.soft_cap, mask=mask)

    return Attend(call, arrays)


def _tokamax_triton(shape: Shape, direction: str) -> Attend:
    _import_tokamax()
    from tokamax._src.ops.attention import base, pallas_triton, pallas_triton_vjp

    _refuse(
        direction == "backward" and shape.first_keys() is not None and shape.T * shape.S >= 2**31,
        "its backward reads a mask of T x S, 2 GB or more here",
    )
    if shape.T == 1:
        tile = (16, 64, 2, 4)
    elif shape.D <= 64:
        tile = (64 if shape.causal or shape.T < 16384 else 128, 128, 3, 4)
    elif shape.D <= 128:
        tile = (64, 64, 3, 4) if shape.causal and shape.T <= 2048 else (128, 128, 3, 8)
    else:
        tile = (128, 32, 3, 8)
    if shape.dtype == "float32":
        tile = (64, 32, 2, 4)  # Larger tiles do not fit in shared memory.
    block_q, block_k, stages, warps = tile
    rows, columns = (64, 64) if shape.D <= 128 else (64, 32)
    if shape.dtype == "float32":
        rows, columns = 32, 32
    backward = pallas_triton_vjp.Config(
        block_m1=rows,
        block_n1=columns,
        block_m2=rows,
        block_n2=columns,
        num_stages=3 if shape.D != 128 else 2,
        num_warps=4,
    )
    op = pallas_triton.PallasTritonFlashAttention(
        config=pallas_triton.Config(
            block_q=block_q, block_k=block_k, num_stages=stages, num_warps=warps
        ),
        vjp=pallas_triton_vjp.PallasTritonFlashAttentionVjp(config=backward),
    )
    return _tokamax(op, base.Mask, shape)


def _tokamax_mosaic(shape: Shape, direction: str) -> Attend:
    _import_tokamax()
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu, pallas_mosaic_gpu_vjp
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_common as common

    # These head dims were timed; other head dims get the configuration of the next larger one.
    size = next(size for size in (64, 128, 256) if size >= shape.D)
    block_q, block_kv, stages = {64: (128, 128, 3), 128: (64, 128, 2), 256: (64, 64, 2)}[size]
    if size == 64 and shape.causal and shape.T >= 4096:
        block_q, block_kv = 64, 256
    rows = 128 if size == 64 and not (shape.causal and shape.T < 8192) else 64
    backward = common.Config(
        block_q_dkv=rows,
        block_kv_dkv=64,
        block_q_dq=rows,
        block_kv_dq=64,
        num_stages=3 if size == 128 and not shape.causal else 2,
        compute_wgs=1 if size == 256 else 2,
    )
    op = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(
        config=pallas_mosaic_gpu.ConfigSM90(
            block_q=block_q, block_kv=block_kv, num_stages=stages, persistent=False
        ),
        vjp=pallas_mosaic_gpu_vjp.PallasMosaicGpuFlashAttentionVjp(config=backward),
    )
    return _tokamax(op, base.Mask, shape)


# ------------------------------------------------------------------------------------------------
# FlashAttention-3, its own CUDA kernels.


def _flash_attention_3(shape: Shape, direction: str) -> Attend:
    from flash_attn3_jax import flash_mha

    _only(shape, "grouped heads")
    _refuse(shape.D != 128, "its JAX package has head dim 128 alone")
    _refuse(shape.dtype == "float32", "is for 16 bits")
    _refuse(
        direction == "backward" and not shape.causal,
        "its gradients without a causal mask are wrong in flash-attn3-jax 0.2.3",
    )
    return Attend(functools.partial(flash_mha, is_causal=shape.causal))


# ------------------------------------------------------------------------------------------------
# cuEquivariance, for structural biology.


def _cuequivariance(shape: Shape, direction: str) -> Attend:
    from cuequivariance_jax import triangle_attention

    _only(shape, "bias", "trained bias")
    _refuse(shape.causal, "has no causal mask")
    _refuse(shape.option is None, "needs a bias")

    def call(q, k, v, bias):
        q, k, v = (x[None] for x in (q, k, v))
        return triangle_attention(q, k, v, bias[None], None, scale=shape.scale)[0][0]

    return Attend(call, shape.arrays(), heads_first=True)


# ------------------------------------------------------------------------------------------------
# Triton, by itself and through PyTorch.


def _triton_tutorial(shape: Shape, direction: str) -> Attend:
    import jax_triton

    from scripts.benchmarks import triton_kernel

    _only(shape)
    _refuse(direction == "backward", "is a forward alone")
    _refuse(bool(shape.T % 128 or shape.S % 128), "is for multiples of 128")
    _refuse(shape.dtype == "float32", "is for 16 bits")
    _refuse(shape.D not in triton_kernel.CONFIGS, "has no tiles for this head dim")

    def call(q, k, v):
        return jax_triton.triton_call(
            q,
            k,
            v,
            shape.T,
            shape.S,
            np.float32(shape.scale * math.log2(math.e)),
            kernel=triton_kernel.tuned(shape.D),
            out_shape=q,
            grid=lambda meta: (shape.T // meta["BLOCK_Q"], shape.B * shape.N),
            HEAD_DIM=shape.D,
            CAUSAL=shape.causal,
        )

    return Attend(call, heads_first=True)


@functools.cache
def _give_triton_a_cache() -> None:
    """Restore Triton's cache, which jax_triton switches off and PyTorch's kernels need."""
    import triton

    folder = tempfile.mkdtemp(prefix="triton-")
    os.environ["TRITON_CACHE_DIR"] = folder
    triton.knobs.cache.dir = folder


def _torch_sdpa(backend: str, shape: Shape, direction: str) -> TorchAttend:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _give_triton_a_cache()
    _only(shape, "grouped heads", "head dim of its own for values")
    _refuse(shape.dtype == "float32", "is for 16 bits")

    def call(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.N != shape.K
            )

    return TorchAttend(call)


def _torch_flex(shape: Shape, direction: str) -> TorchAttend:
    import torch
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    _only(
        shape,
        *("grouped heads", "head dim of its own for values", "window", "segment ids", "lengths"),
        *("soft cap", "ALiBi", "bias", "mask array"),
    )
    _only_causal_segments(shape)
    _give_triton_a_cache()
    torch._dynamo.config.recompile_limit = 1000  # Each shape is compiled once.
    # The timer computes the gradient many times from one forward.
    torch._functorch.config.donated_buffer = False
    torch.set_float32_matmul_precision("high")  # TF32, the default of JAX.
    compiled = torch.compile(flex_attention, dynamic=False)
    arrays = {
        name: torch.from_dlpack(jnp.asarray(x)).to("cuda") for name, x in shape.arrays().items()
    }
    sees = []
    if shape.causal:
        sees.append(lambda b, h, i, j: i >= j)
    if shape.first_keys() is not None:
        first = torch.from_numpy(shape.first_keys()).to("cuda")
        sees.append(lambda b, h, i, j: j >= first[b, i])
    if shape.lengths:
        lengths = arrays["key_value_seq_lengths"]
        sees.append(lambda b, h, i, j: j < lengths[b])
    if shape.option == "mask array":
        mask = arrays["mask"].bool()
        sees.append(lambda b, h, i, j: mask[0, 0, i, j])
    block_mask = None
    if sees:
        batch = shape.B if len(sees) > shape.causal else None
        block_mask = create_block_mask(
            and_masks(*sees), batch, None, shape.T, shape.S, device="cuda"
        )
    score = {
        "soft cap": lambda s, b, h, i, j: shape.soft_cap * torch.tanh(s / shape.soft_cap),
        "ALiBi": lambda s, b, h, i, j: s - arrays["alibi_slopes"][h] * (i - j).abs(),
        "bias": lambda s, b, h, i, j: s + arrays["bias"][0, h, i, j],
    }.get(shape.option)

    def call(q, k, v):
        return compiled(
            q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=shape.N != shape.K
        )

    return TorchAttend(call)


@dataclasses.dataclass(frozen=True)
class Peer:
    """One competitor.

    Attributes:
        package: The distribution whose version is recorded.
        build: (shape, direction) -> `Attend` or `TorchAttend`.
        install: The requirement that installs it, if no extra of this package does.
    """

    package: str
    build: Callable[[Shape, str], Attend | TorchAttend]
    install: str | None = None

    @property
    def version(self) -> str | None:
        """Return the version of the distribution; None if it is not installed."""
        if self.package == "pallas-flash":
            return pallas_flash.__version__  # A checkout need not be installed.
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


OURS = "ours"
# "mosaic" with an option; timed where they are named.
VARIANTS = {
    "ours_invariant": dict(batch_invariant=True),
    "ours_reproducible": dict(reproducible=True),
}
_EXTRA = "pip install -e '.[bench]', on Python 3.12 or newer"
_TORCH = "pip install torch"
PEERS = {
    OURS: Peer("pallas-flash", functools.partial(_ours, None)),
    "ours_triton": Peer("pallas-flash", functools.partial(_ours, "triton")),
    "ours_mosaic": Peer("pallas-flash", functools.partial(_ours, "mosaic")),
    **{
        name: Peer("pallas-flash", functools.partial(_ours, "mosaic", **options))
        for name, options in VARIANTS.items()
    },
    "ours_xla": Peer("pallas-flash", functools.partial(_ours, "xla")),
    "ours_reference": Peer("pallas-flash", functools.partial(_ours, "reference")),
    "jax_xla": Peer("jax", functools.partial(_jax_nn, "xla")),
    "jax_cudnn": Peer("jax", functools.partial(_jax_nn, "cudnn")),
    "jax_mha": Peer("jax", _jax_mha),
    "jax_mosaic": Peer("jax", _jax_mosaic),
    "tokamax_triton": Peer("tokamax", _tokamax_triton, _EXTRA),
    "tokamax_mosaic": Peer("tokamax", _tokamax_mosaic, _EXTRA),
    "flash_attention_3": Peer(
        "flash-attn3-jax", _flash_attention_3, "pip install flash-attn3-jax einops"
    ),
    "cuequivariance": Peer(
        "cuequivariance-jax",
        _cuequivariance,
        "pip install cuequivariance-jax cuequivariance-ops-jax-cu13",
    ),
    "triton_tutorial": Peer("triton", _triton_tutorial, _EXTRA),
    "torch_cudnn": Peer("torch", functools.partial(_torch_sdpa, "CUDNN_ATTENTION"), _TORCH),
    "torch_flash": Peer("torch", functools.partial(_torch_sdpa, "FLASH_ATTENTION"), _TORCH),
    "torch_flex": Peer("torch", _torch_flex, _TORCH),
}
