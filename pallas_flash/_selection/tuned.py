"""The winners of `tuning.tune`: the file that holds them, and the calls that they serve.

Tiles that a call asks for come first, then a winner, then the table. A winner serves only a GPU
that is here. A program for a GPU that is only described gets the table's tiles on every machine.

A process reads the file once, when it first picks tiles for a GPU, and again after `tuning.tune`
wrote to it. Programs that were compiled before keep their tiles. PALLAS_FLASH_TUNED in the
environment names another file, or is 0 for none.

Several processes may store at once: each reads, changes and replaces the file while it holds a lock
on another file beside it. Winners that a process cannot write serve that process, and its next
`store` writes them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_flash._problem.features import CallFeatures, Option
from pallas_flash._problem.tile_sizes import (
    KERNELS,
    MOSAIC,
    OF_PASS,
    Tile,
    TileSizes,
    filled,
    given_tiles,
    power_of_2,
    selected,
    tile_of,
)

# The mark of a file that `store` wrote, and the number of its form. Files with another number are
# ignored.
MADE_BY, SCHEMA = "pallas_flash.tuning.tune", 3
REMOVE = "Remove them with `python -m pallas_flash tune --clear`."

# The first characters of a file that `store` wrote, and a whole winner in it. A winner has two
# spaces before it, and its tiles have more.
_START = f'{{\n "made_by": "{MADE_BY}"'
_WINNER = re.compile(r'^  ".*": \{(?:\n   .*)*\n  \}', re.MULTILINE)

# Winners that this process could not write, by file.
_UNSAVED: dict[Path, dict[str, TileSizes]] = {}

# Queries, or keys, of all heads and batch elements from which on every GPU has enough programs.
MANY = 2**18


def file() -> Path | None:
    """Return the path of the file of winners; None if they are switched off."""
    named = os.environ.get("PALLAS_FLASH_TUNED", "")
    if named == "0":
        return None
    if named not in ("", "1"):
        return Path(named)
    import platformdirs  # Late, because without a GPU it is not needed.

    return platformdirs.user_cache_path("pallas_flash") / "tiles.json"


def key(f: CallFeatures, gpu: str) -> str:
    """Return the key of a call: a line to read. Calls with the same key share a winner.

    * The GPU's name, which implies its compute capability;
    * the version of JAX and a fingerprint of the kernels, because results were checked for the
      program that this compiler made of these sources;
    * the dtype (and the precision of products in float32), both head dims, and whether query heads
      share keys. In decoding, the number of rows that share keys;
    * the kind of the mask, and whether arrays hold its runs of keys, because then the host cannot
      schedule them before the launch;
    * the options, and the bytes of arrays that are read for each pair of a query and a key;
    * whether the call is batch-invariant, which fixes the keys of a block;
    * both lengths, and the queries and keys of all heads and batch elements. They are rounded up to
      powers of two, and the latter two are cut off at MANY.
    """
    dtype = f.dtype + (f" ({f.precision})" if f.precision else "")
    # Whether a scale may exceed 1 changes no tile.
    options = [x for x in Option if x in f.options and x is not Option.SCALE]
    more = "".join(f" + {option}" for option in options)
    more += f" + {f.pair_bytes} bytes a pair" if f.pair_bytes else ""
    more += " + batch-invariant" if f.batch_invariant else ""
    sharing = "shared" if f.groups > 1 else "own"
    if f.few_queries:
        sharing = f"{power_of_2(f.q_len * f.groups)} rows'"
    mask = f"{f.mask} by arrays" if f.by_arrays else f.mask
    return (
        f"{gpu}, jax {jax.__version__}, kernels {_fingerprint()}: {dtype}, H {f.head_dim}, "
        f"V {f.value_dim}, {sharing} keys, {mask} mask{more}, "
        f"T {power_of_2(f.q_len)}, S {power_of_2(f.kv_len)}, "
        f"in all {min(MANY, power_of_2(f.rows))} and {min(MANY, power_of_2(f.kv_rows))}"
    )


# Modules outside of the kernels' folders that shape kernels.
_SHAPE = (
    *("_problem/blocks", "_problem/masks", "_problem/mask_leaves", "_problem/traversal"),
    *("_problem/scores", "_problem/operands", "_problem/dropout", "_problem/key_center"),
    *("_problem/checks", "_problem/invariance", "_jax/hardware"),
)
# A winner replaces the tiles of the first, and the others are never tuned.
_NOT_KERNELS = (
    "tiles.py",
    "paged_kernel.py",
    "eight_bit.py",
    "backward_tables.py",
    "tangent_kernel.py",
)


@functools.cache
def _fingerprint() -> str:
    folder = Path(__file__).parents[1]
    backends = folder / "_backends"
    kernels = [*sorted(backends.glob("triton/*.py")), *sorted(backends.glob("mosaic/**/*.py"))]
    sources = [path for path in kernels if path.name not in _NOT_KERNELS]
    sources += [folder / f"{name}.py" for name in _SHAPE]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]


def lookup(f: CallFeatures, gpu: str, check: Callable[[TileSizes], Any]) -> TileSizes | None:
    """Return the tiles of the winner for a call on a GPU that is here; None without a winner.

    Args:
        f: the call.
        gpu: name of the GPU.
        check: raises ValueError if a tile of the winner does not fit on the GPU.
    """
    path = file()
    if path is None or not (winners := _with_unsaved(path, read(path))):
        return None
    winner = winners.get(key(f, gpu))
    try:
        if winner is not None:
            check(winner)
        return winner
    except ValueError as error:
        return _ignore(path, f"{error} {REMOVE}")


@functools.cache
def read(path: Path) -> dict[str, TileSizes]:
    """Return the winners of a file by key; none, with a warning, if `parse` refuses the file."""
    try:
        return parse(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # A broken file must not stop attention.
        _ignore(path, str(error))
        return {}


def parse(path: Path) -> dict[str, TileSizes]:
    """Return the winners of a file by key.

    Raises:
        OSError: the file cannot be read, or is not there.
        ValueError: the file was not written by `store` of this version.
    """
    content = _ours(path)
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return {
            name: TileSizes(**{kernel: _tile(kernel, tile) for kernel, tile in winner.items()})
            for name, winner in content["winners"].items()
        }
    except Exception as error:  # A file may hold anything.
        raise ValueError(
            f"winners in {path} must be in this version's form, schema {SCHEMA}; got "
            f"{type(error).__name__}: {error!s:.100} {REMOVE}"
        ) from error


def _tile(kernel: str, numbers: dict[str, Any]) -> Any:
    """Return a tile; the names of its numbers tell its class."""
    return (Tile if "num_warps" in numbers else MOSAIC[kernel])(**numbers)


def _ours(path: Path) -> dict[str, Any]:
    """Return the content of a file with the mark of `store`; other files are never replaced."""
    # Reading a pipe may never end.
    if path.is_file() or not path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            content = _recovered(path, text)
        except (RecursionError, ValueError):  # It is nested too deep, or has too long a number.
            content = None
        if isinstance(content, dict) and content.get("made_by") == MADE_BY:
            return content
    raise ValueError(
        f"{path} must be a file that {MADE_BY} wrote, or none; got another. Move it away, or name "
        "another file in PALLAS_FLASH_TUNED."
    )


def _recovered(path: Path, text: str) -> dict[str, Any]:
    """Return what can be read of a file that is empty or damaged; {} if `store` did not write it.

    A full disk or a machine that stops can leave a part of a file, or zeros in its place.
    """
    text = text.rstrip("\0\n ")
    if not (text.startswith(_START) or _START.startswith(text)):
        return {}
    winners = {}
    for winner in _WINNER.findall(text):
        with contextlib.suppress(json.JSONDecodeError):
            winners |= json.loads(f"{{{winner}}}")
    _warn(
        f"pallas_flash found {path} empty or damaged: it uses the {len(winners)} winners that it "
        "can read, and the next `tuning.tune` writes a whole file."
    )
    schema = re.search(r'^ "schema": (\d+),$', text, re.MULTILINE)
    schema = int(schema[1]) if schema else SCHEMA
    return {"made_by": MADE_BY, "schema": schema, "winners": winners}


def _ignore(path: Path, why: str) -> None:
    """Warn that the table serves instead of the file."""
    _warn(f"pallas_flash ignores the tuned tiles in {path}: {why}")


@functools.cache
def _warn(sentence: str) -> None:
    """Warn, once for each sentence."""
    warnings.warn(sentence, stacklevel=2)


def check() -> None:
    """Raise what `store` would raise if it must not replace the file that is there."""
    path = file()
    with contextlib.suppress(FileNotFoundError):
        if path is not None:
            parse(path)


def remove(path: Path) -> None:
    """Remove a file that `store` of any version wrote; raise for other files as `parse` does."""
    _ours(path)
    path.unlink()


def store(f: CallFeatures, gpu: str, tiles: TileSizes) -> Path | None:
    """Add a winner to the file, and return the file. The winner replaces one with the same key.

    Readers see the old file or the new one, never a part. If the file cannot be written, the winner
    serves this process.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if `store` did not write the file that is there; it stays as it is.
    """
    path = file()
    if path is None:
        return None
    name, unsaved = key(f, gpu), _UNSAVED.setdefault(path, {})
    unsaved[name] = _merged(unsaved.get(name), tiles)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as lock:
        try:
            winners = parse(path)
        except FileNotFoundError:
            winners = {}
        content = {
            name: {k: dataclasses.asdict(tile) for k in KERNELS if (tile := tile_of(sizes, k))}
            for name, sizes in _with_unsaved(path, winners).items()
        }
        content = {"made_by": MADE_BY, "schema": SCHEMA, "winners": content}
        _replace(path, json.dumps(content, indent=1) + "\n", like=path if path.exists() else lock)
    unsaved.clear()
    read.cache_clear()
    return path


def _with_unsaved(path: Path, winners: dict[str, TileSizes]) -> dict[str, TileSizes]:
    """Return winners of a file with those that this process could not write."""
    unsaved = _UNSAVED.get(path, {}).items()
    return winners | {name: _merged(winners.get(name), new) for name, new in unsaved}


def _merged(old: TileSizes | None, new: TileSizes) -> TileSizes:
    """Return a new winner, and tiles of the old one for a pass that the new one does not have."""
    of_pass = ({*OF_PASS[x]} for x in ("forward", "backward"))
    tuned = {x for kernels in of_pass if given_tiles(new).keys() & kernels for x in kernels}
    return filled(new, selected(old or TileSizes(), {*KERNELS} - tuned))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Wait until no other process stores, and keep them waiting; give the lock's file.

    Without locks (on Windows, on some network file systems) it warns and goes on: of two processes
    that store at once, the file then keeps the winner of one.
    """
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        try:
            import fcntl  # Late, because Windows has none.

            fcntl.flock(lock, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            _warn(
                f"pallas_flash stores in {path} without a lock ({error}): a winner that another "
                "process stores at the same time can be lost."
            )
        yield Path(lock.name)


def _replace(path: Path, text: str, like: Path) -> None:
    """Write a file whole, with the permissions of the file `like`, or leave it as it was."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Else a machine that stops can leave the new name on an empty file.
            os.fsync(file.fileno())
        shutil.copymode(like, part)
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
