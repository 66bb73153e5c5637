"""The only table of the kinds of trained heads, by their names in `--draft`.

Each kind is a folder of this package. `PARTS` in its `drafter.py` declares how its checkpoints are recognized, and its
drafter, training, widening and conversions. The table does not import torch, because the command line's help reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from forerun.errors import ModelNotFound
from forerun.fields import read_fields

if TYPE_CHECKING:
    from pathlib import Path

    from forerun.draft.plan import DraftContext, DraftPlan
    from forerun.draft.spec import DraftSpec
    from forerun.heads.blueprint import HeadBlueprint, HeadParts
    from forerun.heads.folder import HeadFolder
    from forerun.models.loading import Blueprint


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads, in a folder of this package. `syntax` shows how to write its drafters in `--draft`."""

    folder: str
    syntax: str

    @property
    def parts(self) -> HeadParts:
        """The declarations in the kind's `drafter.py`."""
        parts: HeadParts = import_module(f"{__package__}.{self.folder}.drafter").PARTS
        return parts

    def find(self, spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
        """The heads of this specification.

        Raises UnknownDrafter for an invalid argument, ModelError for an unusable folder.
        """
        from forerun.draft.plan import refuse_members

        refuse_members(spec)
        return self.parts.blueprint.read(spec, target, partial(open_folder, kind=spec.name, target=target))

    def plan_for(self, spec: DraftSpec, context: DraftContext) -> DraftPlan:
        """The plan of the drafter of this specification."""
        return self.find(spec, context.target).plan(context.unused(str(spec)))


HEADS: Mapping[str, HeadKind] = {
    "early-exit": HeadKind("adapter", "early-exit:LAYERS[:DIR]"),
    "medusa": HeadKind("medusa", "medusa:DIR"),
    "eagle": HeadKind("eagle", "eagle:DIR"),
    "block": HeadKind("block", "block:DIR"),
    "mtp": HeadKind("mtp", "mtp, mtp:DIR"),
}


def open_folder(name: str, kind: str, target: Blueprint) -> HeadFolder:
    """The folder of this name and kind, for the target. Raises ModelError if it cannot be used."""
    from forerun.heads.folder import HeadFolder, refuse_other_weights

    path, layout = find_of_kind(name, kind), HEADS[kind].parts.signs.layout
    if layout is not None:
        refuse_other_weights(path, layout)
    return HeadFolder.at(path, name, target)


def find_of_kind(name: str, kind: str) -> Path:
    """The folder of this name. Raises ModelNotFound if it does not exist, or if its config.json is of another kind."""
    from forerun.heads.folder import WANTED, find_heads

    folder = find_heads(name)
    fields, signs = read_fields(folder / "config.json"), {other: each.parts.signs for other, each in HEADS.items()}
    stored_kind = next((other for other, each in signs.items() if each.match(fields)), kind)
    if stored_kind != kind:
        key = signs[stored_kind].argument
        draft = stored_kind if key is None else f"{stored_kind}:{fields.values[key]}"
        raise ModelNotFound(f"{name} is a drafter of another kind than {kind}: write {draft}:{name}")
    needed = signs[kind].needed
    if needed is not None and fields.values.get(needed) is None:
        raise ModelNotFound(f"{folder} is not a drafter of the kind {kind}: its config.json has no {needed}: {WANTED}")
    return folder
