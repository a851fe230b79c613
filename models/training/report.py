"""The report of a run: what runs, its speed, its memory, and its line of metrics for each step.

Speed is tokens a second, and the model FLOP utilisation (MFU) of the devices:

    MFU = FLOPs of a token * tokens per second / peak FLOPs per second of all devices

After PaLM (https://arxiv.org/abs/2204.02311, appendix B) a token costs

    6 * parameters + 12 * layers * width * context

forward and backward: the first term is for the parameters outside of the embeddings, the second for
the two products of attention, of the width of all query heads. Here the second is halved,
because a causal mask needs only half of the scores; PaLM counts all of them. Windows and documents
are not subtracted. Work that an implementation repeats counts once.
"""

import os
import platform
from typing import Any, NamedTuple

import flax
import jax
import numpy as np

import pallas_flash
from models.config import DecoderConfig
from models.errors import UserError
from models.sharding import AXES, Layout
from models.training.mesh import count_of, describe_mesh
from models.training.processes import say, several
from models.training.settings import TrainConfig

# Dense bfloat16 FLOP/s by JAX's `device_kind`, from NVIDIA's data sheets. For the H200 and the H100
# they print the rate with sparsity, which is twice this.
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
    """The speed, as it is printed and recorded.

    Attributes:
        ms: Milliseconds per update.
        tokens_per_second: Tokens trained on per second.
        mfu: Model FLOP utilisation, 1 at the peak; None where the device's peak is not known.
    """

    ms: float
    tokens_per_second: float
    mfu: float | None

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        return f"{self.ms:.1f} ms/step, {self.tokens_per_second:,.0f} tokens/s{mfu}"


class Work(NamedTuple):
    """The work of an update.

    Attributes:
        tokens: Tokens of an update.
        flops_per_token: FLOPs of a token, forward and backward.
        peak: FLOP/s of all devices; None if their kind is not in the table.
    """

    tokens: int
    flops_per_token: int
    peak: float | None

    def speed(self, ms: float) -> Speed:
        """Return the speed at `ms` milliseconds per update."""
        rate = 1e3 * self.tokens / ms
        mfu = None if self.peak is None else rate * self.flops_per_token / self.peak
        return Speed(ms, rate, mfu)

    def __str__(self) -> str:
        peak = "no peak known, so no MFU"
        if self.peak is not None:
            peak = f"peak {self.peak / 1e12:.0f} TFLOP/s (bfloat16, dense)"
        return (
            f"{self.tokens:,} tokens an update, {self.flops_per_token / 1e6:,.1f} MFLOP a token, "
            f"{peak}"
        )


def work_of(
    model: DecoderConfig, context: int, params: Any, sequences: int, kind: str, count: int = 1
) -> Work:
    """Return the work of an update on `sequences` full contexts by `count` devices of a kind.

    `params` may be shapes.
    """
    embeddings = [params[name] for name in ("embedding", "position_embedding") if name in params]
    parameters = count_of(params) - count_of(embeddings)
    width = model.num_heads * model.head_dim
    return Work(
        tokens=sequences * context,
        flops_per_token=6 * parameters + 12 * model.num_layers * width * context // 2,
        peak=PEAK_FLOPS[kind] * count if kind in PEAK_FLOPS else None,
    )


def program_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that a compiled program holds on each device, its arguments among them."""
    plan = program.memory_analysis()
    assert plan is not None  # XLA has one for CPUs and GPUs
    given = plan.argument_size_in_bytes - plan.alias_size_in_bytes
    return given + plan.output_size_in_bytes + plan.temp_size_in_bytes


def peak_bytes() -> int | None:
    """Return the most bytes in use on a device of this process; None if JAX does not count them."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return max((x["peak_bytes_in_use"] for x in stats if "peak_bytes_in_use" in x), default=None)


def bits_of(bits: float | None) -> str:
    """Return the words for bits per byte; none for None."""
    return "" if bits is None else f", {bits:.3f} bits per byte"


def metric_lines(
    last_step: int, values, speed: Speed, val_loss, val_bits_per_byte=None
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for consecutive steps; held-out losses are the last one's.

    Raises:
        UserError: A loss is not a finite number.
    """
    first, peak = last_step - len(values) + 1, peak_bytes()
    lines = [
        {
            "step": step,
            "loss": float(value["loss"]),
            "val_loss": val_loss if step == last_step else None,
            "val_bits_per_byte": val_bits_per_byte if step == last_step else None,
            "lr": float(value["lr"]),
            **speed._asdict(),
            "peak_bytes": peak,
        }
        for step, value in enumerate(values, first)
    ]
    for line in lines:
        if not np.isfinite([line["loss"], line["val_loss"] or 0.0]).all():
            raise UserError(
                f"`loss` must stay finite; got {line['loss']} at step {line['step']}: try a lower "
                "--learning-rate or a longer --warmup-steps."
            )
    return lines


def explain_attention(
    config: TrainConfig, model: DecoderConfig, layout: Layout, *, packed: bool
) -> tuple[str, str]:
    """Return the attention that serves a device in a step, and why not the kernels.

    Raises:
        UserError: The explicit choice does not serve this step here.
    """
    data, fsdp, sequence, tensor = (layout.mesh.shape[name] for name in AXES)
    # Attention divides a sequence itself; of the other axes a device has its share.
    places = layout.sharding(None, "sequence") if sequence > 1 else None
    order = layout.order(config.context)
    positions = None if order is None else order[None]
    batch = config.microbatch // (data * fsdp)
    query, key = (
        jax.ShapeDtypeStruct(
            (batch, config.context, heads // tensor, model.head_dim),
            model.compute_dtype,
            sharding=places,
        )
        for heads in (model.num_heads, model.num_kv_heads)
    )
    ids = jax.ShapeDtypeStruct((batch, config.context), "int32") if packed else None
    try:
        explanation = pallas_flash.explain(
            query,
            key,
            key,
            is_causal=True,
            implementation=model.implementation,
            batch_invariant=model.batch_invariant,
            segment_ids=ids,
            local_window_size=model.local_window_of(0),
            logits_soft_cap=model.attention_soft_cap,
            query_positions=positions,
            key_value_positions=positions,
        )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(str(error).replace("`implementation`", "`attention`")) from error
    # "interpret" and "reference" serve explicit choices alone.
    absent = [why for name, why in explanation.refused.items() if name in ("triton", "mosaic")]
    reason = absent[0] if explanation.implementation == "xla" and absent else ""
    choice = explanation.context_parallelism
    return explanation.implementation + (f", {choice.method}" if choice else ""), reason


def describe(run, params):
    """Print what a `loop.Run` is, on which devices, and through which attention."""
    config, model, layout, text, work = run
    device, packed = jax.local_devices()[0], text.train.readers(1).documents is not None
    attention, reason = explain_attention(config, model, layout, packed=packed)
    devices = "" if layout.mesh.size == 1 else f"{layout.mesh.size} x "
    hosts = f" of {jax.process_count()} processes" if several() else ""
    say(
        "device",
        f"{devices}{device.platform} ({device.device_kind}){hosts}, {os.cpu_count()} CPU cores",
    )
    describe_mesh(config, model, layout)
    say(
        "versions",
        f"python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}, "
        f"pallas_flash {pallas_flash.__version__}",
    )
    say(
        "model",
        f"{count_of(params):,} parameters: {model.num_layers} layers of {model.features}, "
        f"{model.num_heads} query and {model.num_kv_heads} key/value heads, context "
        f"{config.context}, {model.compute_dtype} activations, {model.param_dtype} parameters",
    )
    asked = f"--attention {config.attention}" if config.attention else "chosen automatically"
    say("attention", f"{attention} ({asked}) {reason}".rstrip())
    for label, line in zip(["text", *[""] * len(text.said)], text.said, strict=False):
        say(label, line)
    say("updates", f"{config.steps:,}, {config.warmup_steps} of them warmup")
    say("work", str(work))
