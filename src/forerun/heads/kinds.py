"""The table of kinds of heads: one entry for each, by the name that it has in `--draft`.

A kind declares how its folders are known, and brings what its drafter, its training, its widening and its conversions
need. Nothing else lists kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from forerun.draft.plan import DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.errors import ModelNotFound
from forerun.fields import read_fields
from forerun.heads.adapter import format as adapter
from forerun.heads.adapter.drafter import ExitBlueprint
from forerun.heads.adapter.student import AdapterStudent
from forerun.heads.block import format as block
from forerun.heads.block.convert import LAYOUTS as BLOCK_LAYOUTS
from forerun.heads.block.drafter import BlockBlueprint
from forerun.heads.block.student import BlockStudent
from forerun.heads.blueprint import WideDrafter
from forerun.heads.eagle import format as eagle
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.folder import WANTED, HeadFolder, HeadSigns, OpenFolder, find_heads, refuse_other_weights
from forerun.heads.layouts import DraftLayout
from forerun.heads.medusa import format as medusa
from forerun.heads.medusa.drafter import MedusaBlueprint
from forerun.heads.medusa.joint import make_medusa
from forerun.heads.mtp import format as mtp
from forerun.heads.mtp.drafter import MtpBlueprint
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.student import MakeStudent
from forerun.models.loading import Blueprint
from forerun.models.widen import Plan


@runtime_checkable
class FoundHeads(Protocol):
    """Heads that were found and checked, but that are not loaded."""

    def plan(self, name: str) -> DraftPlan:
        """The plan of their drafter, which is called so."""
        ...

    def widened(self, plan: Plan) -> WideDrafter:
        """What becomes of them when their target is widened. Raises InvalidRequest."""
        ...


ReadHeads = Callable[[DraftSpec, Blueprint, OpenFolder], FoundHeads]  # of a specification, for a target


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads. `read` finds those of a specification, `student` makes what is trained, and `layouts` are those
    of its conversions. `read` raises UnknownDrafter for a wrong argument, and ModelError for an unusable folder.
    """

    signs: HeadSigns
    read: ReadHeads
    student: MakeStudent
    layouts: tuple[DraftLayout, ...] = ()

    def find(self, spec: DraftSpec, target: Blueprint) -> FoundHeads:
        """The heads that are spelled so."""
        refuse_members(spec)
        return self.read(spec, target, head_folders(spec.name, target))

    def plan_for(self, spec: DraftSpec, context: DraftContext) -> DraftPlan:
        """The plan of the drafter that is spelled so."""
        return self.find(spec, context.target).plan(str(spec))


def in_folder(of: Callable[[HeadFolder], FoundHeads]) -> ReadHeads:
    """How heads are read whose argument is their folder."""

    def read(spec: DraftSpec, _target: Blueprint, open_folder: OpenFolder) -> FoundHeads:
        if spec.argument is None:
            refuse(spec, f"name the folder with the heads, as in {spec.name}:DIR")
        return of(open_folder(spec.argument))

    return read


def read_modules(spec: DraftSpec, target: Blueprint, open_folder: OpenFolder) -> FoundHeads:
    """`mtp`: the modules that ship with the target; `mtp:DIR`: those in a folder."""
    if spec.argument is not None:
        return MtpBlueprint.of(open_folder(spec.argument))
    return MtpBlueprint.of(HeadFolder.at(target.folder, str(target.folder), target), ships=True)


HEADS: Mapping[str, HeadKind] = {
    "block": HeadKind(block.SIGNS, in_folder(BlockBlueprint.of), BlockStudent.fresh, BLOCK_LAYOUTS),
    "eagle": HeadKind(eagle.SIGNS, in_folder(EagleBlueprint.of), EagleStudent.fresh, eagle.LAYOUTS),
    "early-exit": HeadKind(adapter.SIGNS, ExitBlueprint.of, AdapterStudent.fresh),
    "medusa": HeadKind(medusa.SIGNS, in_folder(MedusaBlueprint.of), make_medusa, medusa.LAYOUTS),
    "mtp": HeadKind(mtp.SIGNS, read_modules, MtpStudent.fresh, mtp.LAYOUTS),
}


def head_folders(kind: str, target: Blueprint) -> OpenFolder:
    """What opens folders of this kind for the target. Raises ModelError."""

    def open_folder(name: str) -> HeadFolder:
        path, layout = find_of_kind(name, kind), HEADS[kind].signs.layout
        if layout is not None:
            refuse_other_weights(path, layout)
        return HeadFolder.at(path, name, target)

    return open_folder


def find_of_kind(name: str, kind: str) -> Path:
    """The folder of this name. Raises ModelNotFound where it is not there, and where its config.json shows another kind
    of heads or cannot be of this one."""
    folder = find_heads(name)
    fields = read_fields(folder / "config.json")
    shown = next((other for other, each in HEADS.items() if each.signs.shown_in(fields)), kind)
    if shown != kind:
        key = HEADS[shown].signs.argument
        spelled = shown if key is None else f"{shown}:{fields.values[key]}"
        raise ModelNotFound(f"{name} holds a drafter of another kind: write {spelled}:{name} in the place of {kind}")
    needed = HEADS[kind].signs.needed
    if needed is not None and fields.values.get(needed) is None:
        lacks = f"its config.json has no {needed}"
        raise ModelNotFound(f"{folder} is not what this drafter reads: {lacks}: {WANTED}")
    return folder
