"""Files that a kill or a full disk leaves whole, and folders that one process has at a time."""

import contextlib
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from models.errors import UserError, naming
from models.training.processes import warn

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

# The field by which a JSON file says that this code has written it.
MARK = {"made_by": "models.train of pallas_flash"}
RUN, TOKENIZER, END = "run.json", "tokenizer.json", "generation_config.json"


def read_marked(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file with the mark, None if it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(content, dict) and MARK.items() <= content.items()
    return content if ours else None


def is_run_folder(path: Path) -> bool:
    """Whether a folder belongs to a run."""
    return read_marked(path / RUN) is not None


def write_file(path: Path, content: str | bytes):
    """Replace a file such that a kill or a full disk leaves the old content or the new."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with naming(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            sha256_of(temporary, flush=True)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path, *, flush: bool = False) -> str:
    """Return the hash of a file; with `flush` the disk has its bytes when this returns."""
    with path.open("rb+") if flush else path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path):
    """Hold the lock of a folder; the file stays, and names the last process that held it.

    The operating system releases the lock when the process ends, by a kill, too. A file system
    without locks is used with a warning.

    Raises:
        UserError: Another process holds the lock.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            if fcntl is None:
                raise OSError(0, "no locks on this system")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"`out_dir` must be in no other run's use; got {str(path.parent)!r}, where "
                f"{file.read().strip() or 'one'} works: wait for its end, stop it, or pass "
                "another --out-dir."
            ) from None
        except OSError as error:
            warn(f"{str(path)!r} cannot be locked ({error}): start no second run in this folder.")
        with naming(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
