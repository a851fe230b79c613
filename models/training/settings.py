"""The settings of `python -m models.train`: a dataclass, presets, and the flags made from it."""

import argparse
import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG, weights_folder
from models.config import DecoderConfig, gpt
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
    "attention": ("auto", "mosaic", "triton", "interpret", "xla", "reference"),
    "dtype": ("auto", "float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run; the defaults are the `cpu` preset.

    Fields that are not compared may change when a run resumes, because no loss depends on them. The
    text is compared by its bytes, and not by its path.

    Attributes:
        num_layers: Number of layers of a new model.
        num_heads: Number of its query heads.
        num_kv_heads: Number of its key/value heads; auto is num_heads.
        features: Size of its residual stream.
        context: Tokens of a sequence in training.
        dtype: Type of the activations; auto is bfloat16 on a GPU and float32 elsewhere.
        param_dtype: Type of the parameters.
        attention: An implementation of pallas_flash.attention; auto lets it choose.
        remat: Whether the backward computes a layer's activations again, to save memory. The
            residuals of attention are kept.
        data: Text file, or folder of text files, or of tokens by prepare_tokens.py; auto is
            Python's standard library.
        out_dir: Folder of the run's results; a run in it is resumed.
        init_from: Folder of weights to tune, or of a run that has some; auto is a new model.
        mesh: Devices on each axis, as in data=2,fsdp=2,tensor=2,sequence=2; auto is all of them on
            data. A run may resume with another mesh, which changes only the order of sums.
        seed: Decides the initial parameters and the order of the data.
        steps: Number of optimizer updates.
        batch_size: Sequences per update.
        accumulation: Number of equal parts of the batch that are computed one after the other, to
            save memory; the update is of the whole batch.
        learning_rate: Peak learning rate of AdamW, reached after warmup_steps; it falls to a tenth.
        warmup_steps: Updates of linear warmup. A preset's is cut to a tenth of --steps.
        weight_decay: AdamW's decay, of matrices only.
        eval_every: Updates between two looks at the held-out text.
        eval_batches: Size of such a look, in batches spread evenly over the held-out text.
        log_every: Updates between two writes to metrics.jsonl, which has a line for each update.
        checkpoint_every: Updates between two checkpoints.
        keep_checkpoints: Number of checkpoints kept.
        gradient_check: Whether to compare gradients with the reference before training.
    """

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    features: int = 128
    context: int = 128
    dtype: str | None = None
    param_dtype: str = "float32"
    attention: str | None = None
    remat: bool = False
    data: str | None = dataclasses.field(default=None, compare=False)
    out_dir: str = dataclasses.field(default="runs/model", compare=False)
    init_from: str | None = None
    mesh: str | None = dataclasses.field(default=None, compare=False)
    seed: int = 0
    steps: int = 800
    batch_size: int = 16
    accumulation: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    eval_every: int = 200
    eval_batches: int = 20
    log_every: int = dataclasses.field(default=10, compare=False)
    checkpoint_every: int = dataclasses.field(default=200, compare=False)
    keep_checkpoints: int = dataclasses.field(default=3, compare=False)
    gradient_check: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                default = (1, INT) if isinstance(value, int) else (TINY, HUGE)
                low, high = RANGES.get(name, default)
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
        if self.mesh is not None:
            mesh_sizes(self.mesh)

    @property
    def microbatch(self) -> int:
        """Sequences computed at once."""
        return self.batch_size // self.accumulation


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
            folder = weights_folder(Path(config.init_from))
            if folder is None:
                raise UserError(
                    f"`init_from` must be a folder with {CONFIG}, or a run that has ended; got "
                    f"{config.init_from!r}."
                )
            model = DecoderConfig.from_json((folder / CONFIG).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(str(error)) from None
    if model.rope is None and config.context > model.context:
        raise UserError(
            f"`context` must be at most {model.context}, the learned positions of the weights; got "
            f"{config.context}."
        )
    return dataclasses.replace(
        model,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        implementation=config.attention,
        remat=config.remat,
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the size of each axis of a mesh in the form of `TrainConfig.mesh`; absent axes have 1.

    Raises:
        UserError: The text has another form.
    """
    sizes = dict.fromkeys(AXES, 1)
    given = re.findall(r"(\w+)=([1-9][0-9]{0,8})(?:,|$)", text)
    written = ",".join(f"{name}={size}" for name, size in given)
    if written != text or len(dict(given)) < len(given) or not dict(given).keys() <= sizes.keys():
        raise UserError(
            f"`mesh` must give axes of {', '.join(AXES)} once, with a positive size, as in "
            f"data=2,fsdp=4; got {text!r}."
        )
    return sizes | {name: int(size) for name, size in given}


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


def attribute_docs() -> dict[str, str]:
    """Return the `Attributes` section of `TrainConfig` by name: the help of the flags."""
    docs, name = {}, ""
    # Python 3.13 strips the docstring's indentation, older versions keep it.
    section = inspect.cleandoc(TrainConfig.__doc__ or "").partition("Attributes:\n")[2]
    for line in section.splitlines():
        # A new entry is indented by four columns, a continuation by eight.
        if line.startswith(" " * 8):
            docs[name] += " " + line.strip()
        elif ":" in line:
            name, _, docs[name] = line.strip().partition(": ")
    return docs


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with a flag for every field of the settings; `auto` is a flag's None."""
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
        help="values of the flags that are not given (default: cpu; with weights: fine-tune)",
    )
    docs, hints = attribute_docs(), typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        flag, name = "--" + field.name.replace("_", "-"), field.name
        values = {preset: x.get(name, field.default) for preset, x in PRESETS.items()}
        said = {preset: "auto" if x is None else f"{x!r}" for preset, x in values.items()}
        others = [f"{preset}: {x}" for preset, x in said.items() if x != said["cpu"]]
        default = "; ".join([f"default: {said['cpu']}", *others])
        text = f"{docs[name]} ({default})".replace("%", "%%")
        kind, *rest = typing.get_args(hints[name]) or (hints[name],)
        if name in CHOICES:
            parser.add_argument(flag, choices=CHOICES[name], help=text)
        elif kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = kind.__name__ + (" or auto" if rest else "")
            number = flag_type(kind, metavar)
            parser.add_argument(flag, type=number, metavar=metavar.upper(), help=text)
    return parser


def flag_type(kind: type, name: str):
    """Return a parser of a flag's value; argparse calls the parser `name` in its errors."""

    def parse(value: str):
        return value if value == "auto" and name.endswith("auto") else kind(value)

    parse.__name__ = name
    return parse


def config_from_flags(flags: dict[str, Any]) -> TrainConfig:
    """Return a preset with the given flags in it.

    Raises:
        UserError: The values do not fit together.
    """
    values: dict[str, Any] = {name: None if x == "auto" else x for name, x in flags.items()}
    tuned = values.get("init_from") is not None
    base = PRESETS[values.pop("preset", "fine-tune" if tuned else "cpu")]
    if tuned and (given := [name for name in SHAPE if name in values]):
        raise UserError(
            f"`{given[0]}` must be left out with weights in `init_from`, because their config.json "
            f"has it; got {values[given[0]]}."
        )
    if "steps" in values:
        warmup = base.get("warmup_steps", TrainConfig.warmup_steps)
        values.setdefault("warmup_steps", min(warmup, values["steps"] // 10))
    return TrainConfig(**base | values)
