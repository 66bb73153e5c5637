"""The table of what can be trained: a draft model, and every kind of heads (`heads/kinds.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.heads.kinds import HEADS
from forerun.heads.student import MakeStudent, Student, StudentSizes
from forerun.models.loading import Blueprint
from forerun.train.draft_model import DraftModelStudent, DraftShape
from forerun.train.settings import check_choice


def draft_model(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """A draft model: a fresh one of these sizes, or a checkpoint to go on from."""
    sizes.only("draft", "layers", "hidden", "heads", "mlp", "init")
    if sizes.init is None:
        return DraftModelStudent.fresh(target, DraftShape(sizes.layers, sizes.hidden, sizes.heads, sizes.mlp), seed)
    sizes.only("draft --init", "init")
    return DraftModelStudent.going_on(target, sizes.init)


TRAINED: Mapping[str, MakeStudent] = {"draft": draft_model, **{name: kind.student for name, kind in HEADS.items()}}
KINDS = {name: TRAINED[name] for name in sorted(TRAINED)}


def make_student(kind: str, target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """The student of a kind. Raises InvalidRequest for a kind that there is not, or a size that does not fit."""
    check_choice("kind", kind, tuple(KINDS))
    return KINDS[kind](target, sizes, seed)
