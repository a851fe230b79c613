"""Files of a run folder: how they are written, and by which mark a folder is one of ours."""

import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

from scripts.training.messages import UserError, warn

try:
    import fcntl
except ModuleNotFoundError:  # no Unix
    fcntl = None

RUN, METRICS, CURVES, CHECKPOINTS = "run.json", "metrics.jsonl", "loss.png", "checkpoints"
# The field of our JSON files that says whose they are.
MARK = {"made_by": "scripts/train_gpt.py of pallas_flash"}


def replace_file(path: Path, content: str | bytes):
    """Writes a file such that a kill or a full disk leaves the old content or the new."""
    temporary = path.with_name(f".{path.name}.train_gpt")
    content = content.encode() if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path):
    """Brings the names in a folder to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_marked(path: Path) -> dict[str, Any]:
    """Reads a JSON file of ours.

    Raises:
        ValueError: It is not ours; the message says why.
        OSError: It cannot be read.
    """
    if not path.is_file():
        raise ValueError("is no file")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    if not isinstance(content, dict) or any(content.get(k) != v for k, v in MARK.items()):
        raise ValueError('has no field "made_by" that names this script')
    return content


def is_run_folder(path: Path) -> bool:
    """Whether a folder is the one of a run of this script."""
    try:
        return bool(read_marked(path / RUN))
    except (ValueError, OSError):
        return False


def cause(error: Exception) -> str:
    """Why something failed, in a few words: TensorStore's messages go on for pages."""
    number = getattr(error, "errno", None)
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        number = int(found[1])
    if number:
        return os.strerror(number)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def told(path: Path, consequence: str = "pass another --out-dir"):
    """Turns an error of the file system into a sentence that ends by the consequence."""
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        name = error.filename or path
        raise UserError(
            f"`out_dir` must be a folder that can be read and written; got {cause(error)!r} at "
            f"{str(name)!r}: {consequence}."
        ) from error


@contextlib.contextmanager
def lock(path: Path, out_dir: str):
    """Holds the lock of a run folder; the file is kept, and says who was the last to have it.

    Raises:
        UserError: Another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            if fcntl is None:
                raise OSError(0, "no locks on this system")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(handle, 200).decode(errors="replace").strip()
            raise UserError(
                f"`out_dir` must be in no other run's use; got {out_dir!r}, where {who or 'one'} "
                "trains: wait for its end, stop it, or pass another --out-dir."
            ) from None
        except OSError as error:
            warn(f"{str(path)!r} cannot be locked ({error}): start no second run in this folder.")
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        # Which gives the lock back.
        os.close(handle)
