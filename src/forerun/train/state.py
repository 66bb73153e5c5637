"""Checkpoints of a training, which can be killed at any time and resumes to exactly the same weights.

A checkpoint has the weights, the optimizers' states, the progress, and the best weights with their figures. Each step
is a function of its number and of the weights before it, so nothing else is needed. Checkpoints are replaced
atomically. `run.json` in the same folder has everything that determines the result: a folder of another training, or
with other files, is refused; only a finished training may be made longer.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.draft.auto import RECORD
from forerun.errors import FolderTaken
from forerun.limits import shown
from forerun.store import Journal, flat, save_pickle, writable, write_whole

FORM = 1  # format version
STATE = "state"  # folder inside the drafter's
HEAD, CHECKPOINT, LOG, ROUND_COSTS = "run.json", "checkpoint.pt", "train.jsonl", "round-costs.json"
LENGTHS = ("settings.steps", "settings.hours")
# What torch.load raises for damaged files, and the constructor for another object.
DAMAGES = (RuntimeError, pickle.UnpicklingError, EOFError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(slots=True)
class TrainState:
    """The state of a training. `looks_since`: evaluations since the best one; `stopped`: why it ended, or "".

    `asked`: the steps or hours requested so far; a later command that requests more continues the training.
    """

    step: int = 0
    seconds: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_step: int = 0
    best_figures: dict[str, Any] | None = None
    first_figures: dict[str, Any] | None = None
    looks_since: int = 0
    stopped: str = ""
    asked: float = math.inf


@dataclass(frozen=True, slots=True)
class TrainFolder:
    """The output folder of a training."""

    folder: Path

    @property
    def state_folder(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / STATE

    @property
    def round_costs(self) -> Path:
        """The file with the costs of rounds at the end of the training."""
        return self.state_folder / ROUND_COSTS

    def log(self, step: int) -> Journal:
        """The log without the entries after this step, since later steps will be repeated."""
        with writable(self.folder):
            log = Journal.read(self.folder / LOG)
            steps = (line.get("step") if isinstance(line, dict) else None for line in log.entries)
            is_later = (not isinstance(each, int) or each > step for each in steps)
            log.keep(next((number for number, later in enumerate(is_later) if later), len(log.entries)))
        return log

    def next_start(self) -> str:
        """What the same command would do next, as the end of a sentence."""
        try:
            state = self.load()
        except FolderTaken:
            state = None
        return "starts again, as nothing was saved yet" if state is None else f"resumes at step {state.step}"

    def claim(self, about: Mapping[str, Any], force: bool) -> None:
        """Claim the folder for this training. With `force`, another training in it is discarded.

        Raises FolderTaken, without changes, if the folder has other files, a training with other settings, or an
        unfinished training of another length.
        """
        about = json.loads(json.dumps({"form": FORM, **about}))
        head = self.state_folder / HEAD
        with writable(self.folder):
            if force and self.folder.exists():
                self.clear()
            if head.exists():
                if self.check_head(head, about):
                    (self.folder / RECORD).unlink(missing_ok=True)
                    write_whole(head, json.dumps(about) + "\n")
                return
            others = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
            if others and others != [STATE] and not force:
                shown = ", ".join(others[:3])
                raise FolderTaken(
                    f"{self.folder} contains {shown}: name another folder with --out, or overwrite it with --force"
                )
            self.state_folder.mkdir(parents=True, exist_ok=True)
            write_whole(head, json.dumps(about) + "\n")

    def check_head(self, head: Path, about: Mapping[str, Any]) -> bool:
        """Whether this training extends the finished one in the folder; False if it is the same training.

        Raises FolderTaken for any other training.
        """
        try:
            stored = json.loads(head.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise FolderTaken(f"{head} is damaged ({error}): start over with --force") from error
        before, now = flat(stored), flat(about)
        differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        kinds = before.get("student.kind"), now.get("student.kind")
        if kinds[0] != kinds[1]:
            raise FolderTaken(
                f"{self.folder} has a training of the kind {kinds[0]}, not {kinds[1]}: name another folder with "
                "--out, or start over with --force"
            )
        if len(differing) == 1 and differing[0] in LENGTHS:
            asked, more = before.get(differing[0]), now[differing[0]]
            if isinstance(asked, int | float) and more is not None and asked < more:
                self.check_finished(differing[0], asked)
                return True
        if differing:
            changes = "; ".join(dict.fromkeys(change(name, before.get(name), now.get(name)) for name in differing))
            raise FolderTaken(
                f"{self.folder} has another training ({changes}): name another folder with --out, or start over with "
                "--force"
            )
        return False

    def check_finished(self, name: str, asked: float) -> None:
        """Raise FolderTaken unless the training has reached its requested length.

        Otherwise the result would depend on when it was interrupted.
        """
        state = self.load()
        if state is None or not state.stopped or state.asked < asked:
            option = f"--{name.rpartition('.')[2]}"
            raise FolderTaken(
                f"{self.folder} has an unfinished training with {option} {asked:g}: finish it with {option} {asked:g} "
                "first, or start over with --force"
            )

    def clear(self) -> None:
        """Remove the state, the log and the record of a training; its drafter stays until the next one is written."""
        if not self.folder.is_dir():
            raise FolderTaken(f"{self.folder} is a file: name a folder with --out")
        shutil.rmtree(self.state_folder, ignore_errors=True)
        for name in (LOG, RECORD):
            (self.folder / name).unlink(missing_ok=True)

    def save(self, state: TrainState) -> None:
        """Replace the checkpoint atomically."""
        held = {name: getattr(state, name) for name in TrainState.__dataclass_fields__}
        with writable(self.folder):
            write_whole(self.state_folder / CHECKPOINT, lambda part: save_pickle(held, part))

    def load(self) -> TrainState | None:
        """Load the checkpoint; None if there is none. Raises FolderTaken if it is damaged."""
        path = self.state_folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            return TrainState(**torch.load(path, map_location="cpu", weights_only=True))
        except OSError as error:
            raise unreadable(path, error) from error
        except DAMAGES as error:
            raise FolderTaken(f"{path} is damaged ({str(error)[:100]}): start over with --force") from error


def unreadable(path: Path, error: OSError) -> FolderTaken:
    """The error for a file of a training that cannot be read."""
    problem = f"cannot be read ({error.strerror}): make it a readable file, or start over with --force"
    return FolderTaken(f"{path} {problem}")


def change(name: str, before: object, now: object) -> str:
    """A difference between two trainings in words, without the values for target and data."""
    part, _, word = name.rpartition(".")
    if part in ("target", "data"):
        return "another target, or other programs or kernels" if part == "target" else "other data"
    option = f"--{word.replace('_', '-')}" if part == "settings" else word
    return f"{option} was {shown(before)} and is {shown(now)}"
