"""The table of kinds of heads: one entry for each, by the name that it has in `--draft`.

A kind declares how its folders are known, and brings what its drafter, its training, its widening and its conversions
need. Nothing else lists kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.draft.plan import DraftContext, DraftPlan, refuse_members
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
from forerun.heads.blueprint import HeadBlueprint
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


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads. `blueprint` finds and checks them, `student` makes what is trained, and `layouts` are those of
    its conversions."""

    signs: HeadSigns
    blueprint: type[HeadBlueprint]
    student: MakeStudent
    layouts: tuple[DraftLayout, ...] = ()

    def find(self, spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
        """The heads that are spelled so. Raises UnknownDrafter for a wrong argument, ModelError for a folder."""
        refuse_members(spec)
        return self.blueprint.read(spec, target, head_folders(spec.name, target))

    def plan_for(self, spec: DraftSpec, context: DraftContext) -> DraftPlan:
        """The plan of the drafter that is spelled so."""
        return self.find(spec, context.target).plan(str(spec))


HEADS: Mapping[str, HeadKind] = {
    "block": HeadKind(block.SIGNS, BlockBlueprint, BlockStudent.fresh, BLOCK_LAYOUTS),
    "eagle": HeadKind(eagle.SIGNS, EagleBlueprint, EagleStudent.fresh, eagle.LAYOUTS),
    "early-exit": HeadKind(adapter.SIGNS, ExitBlueprint, AdapterStudent.fresh),
    "medusa": HeadKind(medusa.SIGNS, MedusaBlueprint, make_medusa, medusa.LAYOUTS),
    "mtp": HeadKind(mtp.SIGNS, MtpBlueprint, MtpStudent.fresh, mtp.LAYOUTS),
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
