"""The settings of `python -m models.train`: a dataclass, presets, and the flags made from it."""

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG, weights_folder
from models.config import DecoderConfig, Implementation, gpt
from models.errors import UserError
from models.sharding import AXES

# A number computed in float32 must be finite there, and one that divides must not be zero. Steps,
# positions and sizes are int32 in JAX.
TINY, HUGE, INT = 1e-30, 1e30, 2**31 - 1
# The smallest and the largest value of a number, where not every positive one is allowed.
RANGES = {
    "context": (2, INT),  # at one, attention has nothing to choose from
    "seed": (0, 2**32 - 1),  # JAX's keys take no more bits
    "warmup_steps": (0, INT),
    "weight_decay": (0, HUGE),
}
# The settings of a new model, which weights have in their config.json.
SHAPE = ("num_layers", "num_heads", "num_kv_heads", "features")
CHOICES = {
    "attention": typing.get_args(Implementation),
    "dtype": ("float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}


# The help of each flag.
HELP = {
    "num_layers": "number of layers of a new model",
    "num_heads": "number of query heads of a new model",
    "num_kv_heads": "number of key/value heads of a new model; by default as many as of queries",
    "features": "size of the residual stream of a new model",
    "context": "tokens of a sequence in training; with weights at most their context",
    "dtype": "type of the activations; by default bfloat16 on a GPU, float32 elsewhere",
    "param_dtype": "type of the parameters",
    "attention": "implementation of pallas_flash.attention; by default it chooses",
    "batch_invariant": "give a token's attention the bits that it has in generation; needs Hopper",
    "remat": "compute activations again in the backward, to save memory; attention's are kept",
    "data": "text, a folder of text, or tokens by prepare_tokens.py; by default Python's source",
    "conversations": "file of conversations to tune weights on; see docs/training.md",
    "out_dir": "folder of the run's results; a run in it is resumed",
    "init_from": "folder of weights to tune, or of a run that has ended; by default a new model",
    "lora_rank": "rank of an adapter (LoRA) that is tuned instead of the weights",
    "lora_alpha": "the adapter is multiplied by this over its rank; by default twice the rank",
    "lora_targets": "matrices with an adapter, as in q_proj,v_proj; by default all",
    "mesh": "devices on each axis, as in data=2,fsdp=2,tensor=2,sequence=2; by default all on data",
    "seed": "decides the initial parameters and the order of the data",
    "steps": "number of optimizer updates",
    "batch_size": "sequences per update",
    "accumulation": "parts of a batch that are computed one after the other, to save memory",
    "learning_rate": "AdamW's largest learning rate, after the warmup; it falls to a tenth of it",
    "warmup_steps": "updates of linear warmup; a preset's are at most a tenth of --steps",
    "weight_decay": "AdamW's decay, of matrices only",
    "eval_every": "updates between two evaluations on the held-out text",
    "eval_batches": "batches of an evaluation, spread evenly over that text",
    "log_every": "updates between two writes to metrics.jsonl",
    "checkpoint_every": "updates between two checkpoints; the best held-out loss has one, too",
    "keep_checkpoints": "number of checkpoints kept, beside that of the best held-out loss",
    "gradient_check": "compare gradients with dense attention's before training",
}
# Settings that may change when a run resumes, because no loss depends on them. A text is compared
# by its tokens, and another mesh changes only the order of sums.
FREE = {"data", "conversations", "out_dir", "mesh", "gradient_check"}
FREE |= {"log_every", "checkpoint_every", "keep_checkpoints"}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run, which `HELP` explains; the defaults are the `cpu` preset."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    features: int = 128
    context: int = 128
    dtype: str | None = None
    param_dtype: str = "float32"
    attention: str | None = None
    batch_invariant: bool = False
    remat: bool = False
    data: str | None = None
    conversations: str | None = None
    out_dir: str = "runs/model"
    init_from: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: str | None = None
    mesh: str | None = None
    seed: int = 0
    steps: int = 800
    batch_size: int = 16
    accumulation: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    eval_every: int = 200
    eval_batches: int = 20
    log_every: int = 10
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    gradient_check: bool = True

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) in (int, float):
                low, high = RANGES.get(name, (1, INT) if type(value) is int else (TINY, HUGE))
                # Written such that NaN is refused, too.
                if not low <= value <= high:
                    raise UserError(f"`{name}` must be between {low} and {high}; got {value}.")
            # A shell variable may be unset.
            if value == "":
                raise UserError(f"`{name}` must have a character; got ''.")
        if self.batch_size % self.accumulation:
            raise UserError(
                f"`batch_size` must be a multiple of `accumulation`; got {self.batch_size} and "
                f"{self.accumulation}."
            )
        if self.warmup_steps >= self.steps:
            raise UserError(
                f"`warmup_steps` must be below `steps`; got {self.warmup_steps} and {self.steps}."
            )
        if self.conversations is not None and (self.init_from is None or self.data is not None):
            raise UserError(
                "`conversations` must come with weights in `init_from`, whose chat template writes "
                "them, and without `data`; got another combination."
            )
        if self.mesh is not None:
            mesh_sizes(self.mesh)
        if self.lora_rank is not None and self.init_from is None:
            raise UserError("`lora_rank` must come with weights in `init_from`; got none.")
        if self.init_from and Path(self.init_from).resolve() == Path(self.out_dir).resolve():
            raise UserError(
                "`out_dir` must be another folder than `init_from`, whose weights stay as they "
                f"are; got {self.out_dir!r} for both."
            )
        for name in ("lora_alpha", "lora_targets"):
            if self.lora_rank is None and getattr(self, name) is not None:
                raise UserError(f"`{name}` must come with `lora_rank`; got none.")

    @property
    def alpha(self) -> float:
        """The alpha of the adapter."""
        assert self.lora_rank is not None
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def microbatch(self) -> int:
        """Sequences computed at once."""
        return self.batch_size // self.accumulation

    @property
    def weights(self) -> Path:
        """The folder of the weights in `init_from`.

        Raises:
            UserError: There are none.
        """
        folder = weights_folder(Path(self.init_from or ""))
        if folder is None:
            raise UserError(
                f"`init_from` must be a folder with {CONFIG}, or a run that has ended; got "
                f"{self.init_from!r}."
            )
        return folder


def settings_alike(settings: dict[str, Any], matrices: Iterable[str]) -> dict[str, Any]:
    """Return settings by name, such that two ways to write one value are equal.

    Args:
        settings: The settings.
        matrices: The names in `lora_targets` that stand for all.
    """
    rank, targets, folder = (settings[x] for x in ("lora_rank", "lora_targets", "init_from"))
    same = {
        "num_kv_heads": settings["num_kv_heads"] or settings["num_heads"],
        "lora_alpha": settings["lora_alpha"] or (rank and 2 * rank),
        "lora_targets": {*(targets.split(",") if targets else matrices)},
        "init_from": folder and (weights_folder(Path(folder)) or Path(folder)).resolve(),
    }
    return settings | same


def model_config(config: TrainConfig, vocab_size: int) -> DecoderConfig:
    """Return the configuration of the weights that are tuned, or of a new model.

    Raises:
        UserError: Sizes do not fit each other, or `Decoder` does not compute the weights.
    """
    try:
        if config.init_from is None:
            sizes = {name: getattr(config, name) for name in SHAPE}
            model = gpt(vocab_size=vocab_size, context=config.context, **sizes)
        else:
            text = (config.weights / CONFIG).read_text(encoding="utf-8-sig")
            model = DecoderConfig.from_json(text)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.context > model.context:
        raise UserError(
            f"`context` must be at most {model.context}, which the weights in `init_from` have by "
            f"their {CONFIG}; got {config.context}."
        )
    return dataclasses.replace(
        model,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        implementation=config.attention,
        batch_invariant=config.batch_invariant,
        remat=config.remat,
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the size of each axis of a mesh in the form of `TrainConfig.mesh`; absent axes have 1.

    Raises:
        UserError: The text has another form.
    """
    given = re.findall(r"(\w+)=([1-9][0-9]{0,8})(?:,|$)", text)
    written = ",".join(f"{name}={size}" for name, size in given)
    if written != text or len(dict(given)) < len(given) or not dict(given).keys() <= {*AXES}:
        raise UserError(
            f"`mesh` must give axes of {', '.join(AXES)} once, with a positive size, as in "
            f"data=2,fsdp=4; got {text!r}."
        )
    return dict.fromkeys(AXES, 1) | {name: int(size) for name, size in given}


PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    # GPT-2's size but for its vocabulary: 85 M parameters.
    "gpt2-small": dict(
        **dict(num_layers=12, num_heads=12, features=768, context=1024),
        **dict(steps=2000, batch_size=32, learning_rate=6e-4, warmup_steps=200),
    ),
    # GPT-3 XL's size but for its vocabulary: 1.2 B parameters.
    "gpt3-xl": dict(
        **dict(num_layers=24, num_heads=16, features=2048, context=2048, remat=True),
        **dict(steps=2000, batch_size=128, accumulation=4, learning_rate=2e-4, warmup_steps=200),
    ),
    # For `init_from`, whose shape it leaves.
    "fine-tune": dict(
        **dict(context=1024, steps=200, batch_size=8, learning_rate=2e-5, warmup_steps=20),
        **dict(eval_every=50, checkpoint_every=100),
    ),
}
# For `lora_rank`.
PRESETS["lora"] = PRESETS["fine-tune"] | dict(learning_rate=2e-4)
# The presets for weights.
TUNING = "fine-tune", "lora"


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with a flag for every field of the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        usage="%(prog)s [--preset NAME] [--data PATH] [--init-from WEIGHTS] [--steps N] ...",
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="values of the flags that are not given (default: cpu; with weights: fine-tune; with "
        "an adapter: lora)",
    )
    hints = typing.get_type_hints(TrainConfig)
    for name, text in HELP.items():
        flag, default = "--" + name.replace("_", "-"), getattr(TrainConfig, name)
        values = {"default": default} | {x: PRESETS[x].get(name, default) for x in PRESETS}
        said = [f"{x}: {y}" for x, y in values.items() if (y != default) == (x != "default")]
        text += "" if values == dict.fromkeys(values) else f" ({'; '.join(said)})"
        kind = (typing.get_args(hints[name]) or (hints[name],))[0]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = CHOICES.get(name)
            metavar = None if choices else kind.__name__.upper()
            parser.add_argument(flag, type=kind, choices=choices, metavar=metavar, help=text)
    return parser


def config_from_flags(flags: dict[str, Any]) -> TrainConfig:
    """Return a preset with the given flags in it.

    Raises:
        UserError: The values do not fit together.
    """
    values = dict(flags)
    tuned = values.get("init_from") is not None
    usual = "lora" if values.get("lora_rank") else "fine-tune" if tuned else "cpu"
    preset = values.pop("preset", usual)
    if tuned != (preset in TUNING) or (preset == "lora") > (usual == "lora"):
        raise UserError(
            f"--preset must be one of {', '.join(TUNING)} with weights in `init_from`, lora with "
            f"`lora_rank` alone, and another one without weights; got {preset}."
        )
    base = PRESETS[preset]
    if tuned and (given := [name for name in SHAPE if name in values]):
        raise UserError(
            f"`{given[0]}` must be left out with weights in `init_from`, because their config.json "
            f"has it; got {values[given[0]]}."
        )
    if "steps" in values:
        warmup = base.get("warmup_steps", TrainConfig.warmup_steps)
        values.setdefault("warmup_steps", min(warmup, values["steps"] // 10))
    config = TrainConfig(**base | values)
    if tuned and "context" not in values:
        # The least that is allowed asks the weights for theirs.
        most = model_config(dataclasses.replace(config, context=2), 0).context
        config = dataclasses.replace(config, context=min(config.context, most))
    return config
