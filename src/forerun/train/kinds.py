"""The table of what can be trained: one entry for each kind, by the name that the command line has for it.

Every kind is a module that makes a `Student`. This file decides which of the sizes a user may give each of them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from forerun.heads.adapter.student import AdapterStudent
from forerun.heads.block.student import BlockShape, BlockStudent
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.medusa.joint import JointMedusaStudent
from forerun.heads.medusa.student import MedusaStudent
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.student import Student, StudentSizes
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


def adapter(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An adapter for an exit."""
    sizes.only("early-exit", "exit", "layers", "mlp")
    return AdapterStudent.fresh(target, sizes.exit, sizes.layers or 1, sizes.mlp, seed)


def medusa(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """Heads, as many as are asked for, of so many blocks; with the target, if that is to be tuned."""
    sizes.only("medusa", "heads", "layers", "hydra", "shared_head", "tune_target")
    heads = MedusaStudent.fresh(target, sizes.heads, sizes.layers, bool(sizes.hydra), bool(sizes.shared_head))
    return heads if sizes.tune_target is None else JointMedusaStudent.fresh(target, heads, seed)


def eagle(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An EAGLE-3 layer."""
    sizes.only("eagle", "mlp", "shared_head", "draft_vocab", "taps")
    return EagleStudent.fresh(target, sizes.mlp, bool(sizes.shared_head), seed, sizes.draft_vocab, sizes.taps)


def block(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """A block drafter: layers, and heads on their states."""
    own = ("layers", "mlp", "block", "markov_rank", "selector_rank", "confidence", "taps", "portable")
    sizes.only("block", *own)
    return BlockStudent.fresh(target, BlockShape(**{name: getattr(sizes, name) for name in own}), seed)


def mtp(target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """An MTP module."""
    sizes.only("mtp", "mlp", "portable")
    return MtpStudent.fresh(target, sizes.mlp, seed, bool(sizes.portable))


MakeStudent = Callable[[Blueprint, StudentSizes, int], Student]
KINDS: Mapping[str, MakeStudent] = {
    "block": block,
    "draft": draft_model,
    "eagle": eagle,
    "early-exit": adapter,
    "medusa": medusa,
    "mtp": mtp,
}


def make_student(kind: str, target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """The student of a kind. Raises InvalidRequest for a kind that there is not, or a size that does not fit."""
    check_choice("kind", kind, tuple(KINDS))
    return KINDS[kind](target, sizes, seed)
