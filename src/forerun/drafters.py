"""The table of all drafters by name: from a specification to a drafter's plan and its label.

The table `PLANNERS` decides which names exist; each drafter's file defines its arguments. Reports show a widened
checkpoint under the name of its source, marked as widened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from forerun.did_you_mean import nearest
from forerun.draft.auto import AUTO_DRAFT, resolve_auto
from forerun.draft.base import Drafter
from forerun.draft.drafter_file import plan_python
from forerun.draft.many.cascade import plan_cascade
from forerun.draft.many.mix import plan_mix
from forerun.draft.plan import DraftContext, DraftPlan
from forerun.draft.spec import PYTHON, DraftSpec, parse_spec, with_class_names
from forerun.draft.text.ngram import plan_ngram
from forerun.draft.text.suffix import plan_suffix
from forerun.draft.vocab.translate import plan_model
from forerun.errors import UnknownDrafter
from forerun.fields import read_fields
from forerun.heads.blueprint import plan_heads
from forerun.heads.kinds import HEADS
from forerun.models.bundled import BUNDLED_DRAFTS
from forerun.models.config import read_widened
from forerun.models.source import find_checkpoint


def plan_drafter(text: str, context: DraftContext) -> DraftPlan:
    """The plan of the drafter with the specification `text`.

    Raises UnknownDrafter if the specification does not parse, names an unknown drafter or cannot be combined like this,
    VocabularyMismatch for a drafter whose tokens cannot be compared with the target's, and ModelError for a checkpoint
    that cannot be used.
    """
    return plan(parse_spec(text), context)


def plan(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """The plan of a parsed specification; raises the errors of `plan_drafter`."""
    planner = PLANNERS.get(spec.name)
    if planner is None:
        near = nearest(spec.name, PLANNERS)
        meant = f"did you mean {near}? Otherwise " if near else ""
        if spec.name in BUNDLED_DRAFTS:
            meant = f"did you mean {BUNDLED_DRAFTS[spec.name]}? Otherwise "
        elif spec.name in ("none", "off"):
            meant = "for plain decoding, name no drafter; else "
        raise UnknownDrafter(f"there is no drafter {spec.name!r}: {meant}choose one of {', '.join(sorted(PLANNERS))}")
    return planner(spec, context)


PLANNERS: Mapping[str, Callable[[DraftSpec, DraftContext], DraftPlan]] = {
    AUTO_DRAFT: lambda spec, context: plan(resolve_auto(spec, context.target), context),
    "cascade": lambda spec, context: plan_cascade(spec, context, plan),
    "mix": lambda spec, context: plan_mix(spec, context, plan),
    "model": plan_model,
    "ngram": plan_ngram,
    PYTHON: plan_python,
    "suffix": plan_suffix,
    **dict.fromkeys(HEADS, plan_heads),
}


def draft_label(draft: str | Drafter | None) -> str:
    """The specification, with labels of widened checkpoints and of own classes; a Drafter's names; empty for None."""
    if draft is None:
        return ""
    return str(labelled(with_class_names(parse_spec(draft)))) if isinstance(draft, str) else "+".join(draft.names)


def labelled(spec: DraftSpec) -> DraftSpec:
    """The specification with labels in place of the folders of widened checkpoints."""
    argument = spec.argument
    if spec.name == "model" and argument is not None:
        argument = label_of(argument, find_checkpoint(argument))
    elif spec.name in HEADS and argument is not None:
        leads = HEADS[spec.name].argument is not None
        lead, colon, folder = argument.partition(":") if leads else ("", "", argument)
        argument = f"{lead}{colon}{folder and label_of(folder, Path(folder))}"
    return replace(spec, argument=argument, members=tuple(labelled(member) for member in spec.members))


def label_of(name: str, folder: Path) -> str:
    """The name of a checkpoint or of heads; for widened ones, the name of their source, marked as widened."""
    path = folder / "config.json"
    return (read_widened(read_fields(path)) if path.is_file() else None) or name
