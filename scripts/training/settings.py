"""The settings of `train_gpt.py`: a dataclass, presets, and the flags that are made from it."""

import argparse
import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

from models.gpt import GPTConfig
from models.sharding import AXES
from scripts.command import Parser
from scripts.training.checkpoints import MARK, read_marked
from scripts.training.processes import FLAGS, UserError
from scripts.training.weights import Tuned, open_weights, weights_folder

# A number computed in float32 must be finite there, and one that divides must not be zero.
TINY, HUGE = 1e-30, 1e30
# Steps, positions and sizes are int32 in JAX.
INT = 2**31 - 1

# The smallest and the largest value of a number, where not every positive one is allowed.
RANGES = {
    "context": (2, INT),  # at one, attention has nothing to choose from
    "rope_theta": (1, HUGE),
    "seed": (0, 2**32 - 1),  # JAX's keys take no more bits
    "final_learning_rate": (0, 1),
    "warmup_steps": (0, INT),
    "weight_decay": (0, HUGE),
    "beta1": (0, 0.999999),  # at one, the mean is divided by zero
    "beta2": (0, 0.999999),
    "temperature": (0, HUGE),
}


# Settings of a model that is made here, and of one that has its shape from weights.
GPT_NAMES = tuple(field.name for field in dataclasses.fields(GPTConfig))
TUNED = ("context", "dtype", "param_dtype", "attention", "remat")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run; the defaults are the `cpu` preset.

    Fields that are not compared may change when a run resumes, because no loss depends on them. The
    text is compared by its bytes, and not by its path.

    Attributes:
        model: The shape of the model; its fields are flags of their own.
        data: Text file, or folder of text files, or of tokens by prepare_tokens.py; auto is
            Python's standard library.
        out_dir: Folder of the run's results; a run in it is resumed.
        init_from: Folder of another run, whose newest parameters this one begins with; or of
            weights with a config.json, which are tuned. auto is random ones.
        mesh: Devices on each axis, as in data=2,fsdp=2,tensor=2,sequence=2; auto is all of them on
            data. A run may resume with another mesh, which changes only the order of sums.
        seed: Decides the initial parameters, the order of the data and the sample.
        steps: Number of optimizer updates.
        batch_size: Sequences per update.
        accumulation: Number of equal parts of the batch that are computed one after the other, to
            save memory; the update is of the whole batch.
        learning_rate: Peak learning rate of AdamW, reached after warmup_steps.
        final_learning_rate: Share of the peak at which the cosine decay ends.
        warmup_steps: Updates of linear warmup. A preset's is cut to a tenth of --steps.
        weight_decay: AdamW's decay, of matrices only.
        beta1: AdamW's decay rate of the gradient's mean.
        beta2: AdamW's decay rate of the gradient's square.
        clip_norm: Largest global norm of the gradient.
        eval_every: Updates between two looks at the held-out text.
        eval_batches: Size of such a look, in batches spread evenly over the held-out text.
        log_every: Updates between two writes to metrics.jsonl, which has a line for each update.
        checkpoint_every: Updates between two checkpoints.
        keep_checkpoints: Number of checkpoints kept; from two on, a disk for as many is enough.
        tensorboard: Whether to write the metrics for TensorBoard, too, into the run's folder.
        gradient_check: Whether to compare gradients with the reference before training.
        sample_tokens: Length of the sample that ends the run, in tokens.
        prompt: Text that the sample continues.
        temperature: Temperature of the sample; 0 takes the most likely token.
        top_k: Number of most likely tokens from which the sample is drawn; auto is all.
    """

    model: GPTConfig | Tuned = dataclasses.field(default_factory=GPTConfig)
    data: str | None = dataclasses.field(default=None, compare=False)
    out_dir: str = dataclasses.field(default="runs/gpt", compare=False)
    init_from: str | None = None
    mesh: str | None = dataclasses.field(default=None, compare=False)
    seed: int = 0
    steps: int = 800
    batch_size: int = 16
    accumulation: int = 1
    learning_rate: float = 3e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    eval_every: int = 200
    eval_batches: int = 20
    log_every: int = dataclasses.field(default=10, compare=False)
    checkpoint_every: int = dataclasses.field(default=200, compare=False)
    keep_checkpoints: int = dataclasses.field(default=3, compare=False)
    tensorboard: bool = dataclasses.field(default=False, compare=False)
    gradient_check: bool = dataclasses.field(default=True, compare=False)
    sample_tokens: int = dataclasses.field(default=400, compare=False)
    prompt: str = dataclasses.field(default="\n", compare=False)
    temperature: float = dataclasses.field(default=0.8, compare=False)
    top_k: int | None = dataclasses.field(default=40, compare=False)

    def __post_init__(self):
        for name, value in flat_config(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            default = (1, INT) if isinstance(value, int) else (TINY, HUGE)
            low, high = RANGES.get(name, default)
            # Written such that NaN is refused, too.
            if not low <= value <= high:
                raise UserError(f"`{name}` must be between {low} and {high}; got {value}.")
        if self.batch_size % self.accumulation:
            raise UserError(
                f"`batch_size` must be a multiple of `accumulation`; got {self.batch_size} and "
                f"{self.accumulation}."
            )
        if self.warmup_steps >= self.steps:
            raise UserError(
                f"`warmup_steps` must be below `steps`; got {self.warmup_steps} and {self.steps}."
            )
        # A shell variable may be unset.
        for name in ("out_dir", "data", "init_from", "prompt"):
            if getattr(self, name) == "":
                raise UserError(f"`{name}` must have a character; got ''.")
        if self.mesh is not None:
            mesh_sizes(self.mesh)

    @property
    def microbatch(self) -> int:
        """Sequences computed at once."""
        return self.batch_size // self.accumulation


def message_with_flags(message: object) -> str:
    """Return a message with flags where it has settings: --batch-size for `batch_size`."""
    names = {
        *FLAGS,
        "config",
        "compare_attention",
        *GPT_NAMES,
        *(x.name for x in dataclasses.fields(TrainConfig)),
    }

    def flag(match):
        return f"--{match[1].replace('_', '-')}" if match[1] in names else match[0]

    return re.sub(r"`(\w+)`", flag, str(message))


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


def flat_config(config: TrainConfig) -> dict[str, Any]:
    """Return all settings in one dictionary, the model's among them."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    model = settings.pop("model")
    names = TUNED if isinstance(model, Tuned) else GPT_NAMES
    return {**{name: getattr(model, name) for name in names}, **settings}


PRESETS = {
    "cpu": TrainConfig(),
    # GPT-2's size but for its vocabulary: 85 M parameters.
    "gpt2-small": TrainConfig(
        model=GPTConfig(context=1024, num_layers=12, num_heads=12, embed_dim=768),
        out_dir="runs/gpt2-small",
        steps=2000,
        batch_size=32,
        learning_rate=6e-4,
        warmup_steps=200,
    ),
    # GPT-3 XL's size but for its vocabulary: 1.2 B parameters.
    "gpt3-xl": TrainConfig(
        model=GPTConfig(context=2048, num_layers=24, num_heads=16, embed_dim=2048, remat=True),
        out_dir="runs/gpt3-xl",
        steps=2000,
        batch_size=128,
        accumulation=4,
        learning_rate=2e-4,
        warmup_steps=200,
    ),
    # For `init_from` with weights, whose shape it leaves.
    "fine-tune": TrainConfig(
        model=GPTConfig(context=1024),
        out_dir="runs/fine-tuned",
        steps=200,
        batch_size=8,
        learning_rate=2e-5,
        warmup_steps=20,
        eval_every=50,
        checkpoint_every=100,
    ),
}


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the `Attributes` section of a class's docstring by name: the help of the flags."""
    docs, name = {}, ""
    # Python 3.13 strips the docstring's indentation, older versions keep it.
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for line in section.splitlines():
        # A new entry is indented by four columns, a continuation by eight.
        if line.startswith(" " * 8):
            docs[name] += " " + line.strip()
        elif ":" in line:
            name, _, docs[name] = line.strip().partition(": ")
    return docs


CHOICES = {
    "attention": ("auto", "mosaic", "triton", "interpret", "xla", "reference", "cudnn"),
    "dtype": ("auto", "float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with a flag for every field of the settings; `auto` is a flag's None."""
    parser = Parser(
        prog="train_gpt.py",
        usage="%(prog)s [--preset NAME] [--data PATH] [--attention NAME] [--steps N] ...",
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    base = parser.add_mutually_exclusive_group()
    base.add_argument(
        "--preset",
        choices=PRESETS,
        help="values of the flags that are not given (default: cpu; with weights: fine-tune)",
    )
    base.add_argument(
        "--config",
        metavar="RUN.JSON",
        help="the same from the run.json of another run; --out-dir is from there, too",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        default=False,
        help="begin a new run, whose first checkpoint replaces a run in --out-dir",
    )
    parser.add_argument(
        "--compare-attention",
        nargs="?",
        choices=CHOICES["attention"],
        const="reference",
        help="train with this attention, too, from the same seed, in a folder beside, and draw "
        "both losses; without a name, with dense attention",
    )
    # Flags whose help says more than the model's documentation.
    model_docs = {
        "dtype": "Type of the activations; auto is bfloat16 on a GPU and float32 elsewhere.",
        "attention": "An implementation of pallas_flash.attention, auto lets it choose; or cudnn: "
        "jax.nn.dot_product_attention by cuDNN, for comparison (a GPU, bfloat16).",
    }
    for title, cls, other_docs in (("model", GPTConfig, model_docs), ("training", TrainConfig, {})):
        group, docs = parser.add_argument_group(title), attribute_docs(cls) | other_docs
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in ("model", "vocab_size"):
                continue
            flag = "--" + field.name.replace("_", "-")
            text = docs.get(field.name, "").replace("None", "auto")
            text = f"{text} {_defaults(title, field.name)}".replace("%", "%%")
            kind, *rest = typing.get_args(hints[field.name]) or (hints[field.name],)
            if field.name in CHOICES:
                group.add_argument(flag, choices=CHOICES[field.name], help=text)
            elif kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            else:
                metavar = kind.__name__ + (" or auto" if rest else "")
                group.add_argument(
                    flag, type=flag_type(kind, metavar), metavar=metavar.upper(), help=text
                )
    return parser


def _defaults(group: str, name: str) -> str:
    """Return the default of a flag in brackets, with the presets whose value differs."""
    defaults = {
        preset: getattr(config.model if group == "model" else config, name)
        for preset, config in PRESETS.items()
    }
    said = {
        preset: "auto" if x is None else f"{x:.4g}" if isinstance(x, float) else f"{x}"
        for preset, x in defaults.items()
    }
    first = said.pop("cpu")
    others = [f"{preset}: {x}" for preset, x in said.items() if x != first]
    return f"({'; '.join([f'default: {first}', *others])})"


def flag_type(kind: type, name: str):
    """Return a parser of a flag's value; argparse calls the parser `name` in its errors."""

    def parse(value: str):
        return value if value == "auto" and name.endswith("auto") else kind(value)

    parse.__name__ = name
    return parse


def config_from_flags(flags: dict[str, Any]) -> TrainConfig:
    """Return a preset, or the settings of another run, with the given flags in it.

    Raises:
        UserError: The values do not fit together.
    """
    values = {k: None if x == "auto" else x for k, x in flags.items()}
    start, path = values.get("init_from"), values.pop("config", None)
    preset = "fine-tune" if start and weights_folder(Path(start)) else "cpu"
    preset = PRESETS[values.pop("preset", preset)]
    base = preset if path is None else config_of_run(Path(path))
    if "steps" in values:
        values.setdefault("warmup_steps", min(base.warmup_steps, values["steps"] // 10))
    return with_values(base, values)


def with_values(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """Return settings with other values, by the names of `flat_config`.

    Raises:
        UserError: The values do not fit together.
    """
    given = {name: x for name, x in values.items() if name in GPT_NAMES}
    others = {name: x for name, x in values.items() if name not in GPT_NAMES}
    path, model = others.get("init_from", config.init_from), config.model
    try:
        if path and weights_folder(Path(path)):
            if shape := [name for name in given if name not in TUNED]:
                raise UserError(
                    f"`{shape[0]}` must be left out with weights in `init_from`, because their "
                    f"config.json has it; got {given[shape[0]]}."
                )
            model = open_weights(path, **{name: getattr(model, name) for name in TUNED} | given)
        elif isinstance(model, Tuned):
            raise UserError(f"`init_from` must have weights, as in `config`; got {path!r}.")
        else:
            model = dataclasses.replace(model, **given)
        return dataclasses.replace(config, model=model, **others)
    except ValueError as error:
        raise UserError(str(error)) from error


def config_of_run(path: Path) -> TrainConfig:
    """Return the settings in the run.json of a run.

    Raises:
        UserError: It is no such file, or it has a setting that is unknown or of the wrong type.
    """
    content = read_marked(path)
    if content is None:
        raise UserError(
            f"`config` must be the run.json of a run of this script; got {str(path)!r}, which "
            "cannot be read, or was not written by it."
        )
    values = {name: x for name, x in content.items() if name not in (*MARK, "text")}
    hints = typing.get_type_hints(GPTConfig) | typing.get_type_hints(TrainConfig)
    for name, x in values.items():
        # JSON writes a float that is whole as an int if a person does.
        kinds = typing.get_args(hints.get(name)) or (hints.get(name),)
        kinds = (*kinds, int) if float in kinds else kinds
        if name not in flat_config(TrainConfig()) or type(x) not in kinds:
            raise UserError(
                f"`config` must have settings of this script; got {name!r}: {x!r} in {str(path)!r}."
            )
    return with_values(TrainConfig(), values)
