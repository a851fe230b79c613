"""How fast training is: tokens a second, and the model FLOP utilisation (MFU) of the device.

    MFU = FLOPs of a token * tokens per second / peak FLOPs per second of all devices

After PaLM (https://arxiv.org/abs/2204.02311, appendix B) a token costs

    6 * parameters + 12 * layers * width * context

forward and backward: the first term is for the parameters outside of the embedding, the second for
the two products of attention. Here the second is halved, because a causal mask needs only half of
the scores; PaLM counts all of them. What an implementation computes twice counts once.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from models.gpt import GPTConfig

# Dense bfloat16 FLOP/s by JAX's `device_kind`, from NVIDIA's data sheets of the H200, H100 and A100
# (those of the first two print the rate with sparsity, which is twice this).
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}


class Speed(NamedTuple):
    """What is shown and written of a measured time.

    Attributes:
        ms: Milliseconds per update.
        tokens_per_second: Tokens trained on per second.
        mfu: Model FLOP utilisation, 1 at the peak; None where the device's peak is not known.
    """

    ms: float
    tokens_per_second: float
    mfu: float | None

    def __str__(self) -> str:
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.1%}"
        return f"{self.ms:.1f} ms/step, {self.tokens_per_second:,.0f} tokens/s, MFU {mfu}"


@dataclasses.dataclass(frozen=True)
class Work:
    """What an update asks of the devices.

    Attributes:
        tokens: Tokens of an update.
        flops_per_token: See the module.
        peak: FLOP/s of all devices; None if their kind is not in the table.
    """

    tokens: int
    flops_per_token: int
    peak: float | None

    def speed(self, ms: float) -> Speed:
        """The speed at `ms` milliseconds per update."""
        rate = 1e3 * self.tokens / ms
        mfu = None if self.peak is None else rate * self.flops_per_token / self.peak
        return Speed(ms, rate, mfu)

    def __str__(self) -> str:
        peak = "no peak known, so MFU is n/a"
        if self.peak is not None:
            peak = f"peak {self.peak / 1e12:.0f} TFLOP/s (bfloat16, dense)"
        return (
            f"{self.tokens:,} tokens an update, {self.flops_per_token / 1e6:,.1f} MFLOP a token, "
            f"{peak}"
        )


def work_of(
    model: GPTConfig, params: Any, sequences: int, device: jax.Device, count: int = 1
) -> Work:
    """The work of an update on `sequences` full contexts by `count` such devices.

    `params` may be shapes.
    """
    parameters = _size(params) - _size(params["embedding"])
    attention = 12 * model.num_layers * model.embed_dim * model.context // 2
    return Work(
        tokens=sequences * model.context,
        flops_per_token=6 * parameters + attention,
        peak=PEAK_FLOPS[kind] * count if (kind := device.device_kind) in PEAK_FLOPS else None,
    )


def _size(params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))
