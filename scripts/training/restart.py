"""What `--restart` does with the run it replaces: aside first, and deleted late."""

import contextlib
import os
from pathlib import Path

from scripts.training.checkpoints import Checkpoints
from scripts.training.files import CHECKPOINTS, CURVES, METRICS, RUN
from scripts.training.messages import say

BEFORE_RESTART = "before-restart"


class Aside:
    """Where `--restart` keeps the old run until the new one has a checkpoint.

    Args:
        path: The run folder.

    A kill may fall between any two lines here. Which it was is told by two things: run.json is
    moved last and comes back first, so without it the rest belongs back in place; and a checkpoint
    in place, beside a run.json that is aside, is the new run's.
    """

    def __init__(self, path: Path):
        self._place, self._aside = path, path / BEFORE_RESTART

    def move(self):
        """Moves the run aside."""
        if (self._place / RUN).exists():
            self._aside.mkdir(exist_ok=True)
            self._move_files(self._place, self._aside)
            os.replace(self._place / RUN, self._aside / RUN)

    def settle(self):
        """Deletes the old run if the new one has a checkpoint, and puts it back otherwise."""
        if not self._aside.is_dir():
            return
        if not (self._aside / RUN).exists():
            self._move_files(self._aside, self._place)
        elif _checkpoints(self._place).steps():
            self._delete_files(self._aside)
            (self._aside / RUN).unlink()
        else:
            self._delete_files(self._place)
            os.replace(self._aside / RUN, self._place / RUN)
            self._move_files(self._aside, self._place)
            say("restored", "the run that --restart had moved aside; --restart again replaces it")
        # What somebody else has put there stays.
        with contextlib.suppress(OSError):
            self._aside.rmdir()

    @staticmethod
    def _move_files(source: Path, target: Path):
        steps = _checkpoints(source).steps()
        if steps:
            (target / CHECKPOINTS).mkdir(exist_ok=True)
        for step in steps:
            (source / CHECKPOINTS / str(step)).rename(target / CHECKPOINTS / str(step))
        for name in (METRICS, CURVES):
            if (source / name).exists():
                os.replace(source / name, target / name)
        with contextlib.suppress(OSError):
            (source / CHECKPOINTS).rmdir()

    @staticmethod
    def _delete_files(path: Path):
        checkpoints = _checkpoints(path)
        checkpoints.clean()
        checkpoints.remove(checkpoints.steps())
        for name in (METRICS, CURVES):
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (path / CHECKPOINTS).rmdir()


def _checkpoints(path: Path) -> Checkpoints:
    return Checkpoints(path / CHECKPOINTS)
