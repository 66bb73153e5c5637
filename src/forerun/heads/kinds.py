"""The table of kinds of heads: one entry for each, by the name that it has in `--draft`.

A kind declares how its folders are known, and brings what its drafter, its training, its widening and its conversions
need. Nothing else lists kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forerun.draft.plan import DraftContext, DraftPlan, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.errors import ModelNotFound
from forerun.fields import read_fields
from forerun.heads.adapter import drafter as adapter
from forerun.heads.adapter.format import SIGNS as ADAPTER_SIGNS
from forerun.heads.adapter.student import AdapterStudent
from forerun.heads.block import convert as block_layouts
from forerun.heads.block.drafter import BlockBlueprint, plan_block
from forerun.heads.block.format import SIGNS as BLOCK_SIGNS
from forerun.heads.block.student import BlockStudent
from forerun.heads.eagle import convert as eagle_layouts
from forerun.heads.eagle.drafter import EagleBlueprint, plan_eagle
from forerun.heads.eagle.format import SIGNS as EAGLE_SIGNS
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.folder import WANTED, HeadFolder, HeadSigns, OpenFolder, find_heads, refuse_other_weights
from forerun.heads.layouts import DraftLayout
from forerun.heads.medusa import convert as medusa_layouts
from forerun.heads.medusa.drafter import MedusaBlueprint, plan_medusa
from forerun.heads.medusa.format import SIGNS as MEDUSA_SIGNS
from forerun.heads.medusa.joint import make_medusa
from forerun.heads.mtp import convert as mtp_layouts
from forerun.heads.mtp.drafter import MtpBlueprint, plan_mtp
from forerun.heads.mtp.format import SIGNS as MTP_SIGNS
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.student import MakeStudent
from forerun.heads.widened import WideDrafter
from forerun.models.loading import Blueprint
from forerun.models.widen import Plan

WidenHeads = Callable[[str, Plan, OpenFolder], WideDrafter]  # of an argument of `--draft`


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads. `plan` plans its drafter for a specification, `student` makes what is trained, and `widen` says
    what becomes of a drafter, given by its argument, whose target is widened; `layouts` are those of its conversions.
    """

    signs: HeadSigns
    plan: Callable[[DraftSpec, DraftContext, OpenFolder], DraftPlan]
    student: MakeStudent
    widen: WidenHeads
    layouts: tuple[DraftLayout, ...] = ()

    def plan_for(self, spec: DraftSpec, context: DraftContext) -> DraftPlan:
        """The plan of the drafter that is spelled so. Raises UnknownDrafter, and ModelError for an unusable folder."""
        refuse_members(spec)
        return self.plan(spec, context, head_folders(spec.name, context.target))


class Widenable(Protocol):
    """A blueprint of heads that can be widened with their target."""

    def widened(self, plan: Plan) -> WideDrafter:
        """What becomes of the heads. Raises InvalidRequest."""
        ...


def widen_read(read: Callable[[HeadFolder], Widenable]) -> WidenHeads:
    """How heads are widened whose argument is their folder, which is read so."""
    return lambda argument, plan, open_folder: read(open_folder(argument)).widened(plan)


HEADS: Mapping[str, HeadKind] = {
    "block": HeadKind(
        BLOCK_SIGNS, plan_block, BlockStudent.fresh, widen_read(BlockBlueprint.of), block_layouts.LAYOUTS
    ),
    "eagle": HeadKind(
        EAGLE_SIGNS, plan_eagle, EagleStudent.fresh, widen_read(EagleBlueprint.of), eagle_layouts.LAYOUTS
    ),
    "early-exit": HeadKind(ADAPTER_SIGNS, adapter.plan_early_exit, AdapterStudent.fresh, adapter.widened_adapter),
    "medusa": HeadKind(MEDUSA_SIGNS, plan_medusa, make_medusa, widen_read(MedusaBlueprint.of), medusa_layouts.LAYOUTS),
    "mtp": HeadKind(MTP_SIGNS, plan_mtp, MtpStudent.fresh, widen_read(MtpBlueprint.of), mtp_layouts.LAYOUTS),
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
