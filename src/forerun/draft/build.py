"""From a draft specification to the plan of a drafter, from which it is built.

This module decides which names exist: one table, `PLANNERS`. What their arguments mean is decided where each drafter
is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from forerun.draft.auto import AUTO_DRAFT, settled
from forerun.draft.cascade import plan_cascade
from forerun.draft.mix import plan_mix
from forerun.draft.model.block import plan_block
from forerun.draft.model.eagle import plan_eagle
from forerun.draft.model.early_exit import plan_early_exit
from forerun.draft.model.medusa import plan_medusa
from forerun.draft.model.mtp import plan_mtp
from forerun.draft.ngram import plan_ngram
from forerun.draft.plan import DraftContext, DraftPlan
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.draft.suffix import plan_suffix
from forerun.draft.translate import plan_model
from forerun.errors import UnknownDrafter
from forerun.models.bundled import BUNDLED_DRAFTS
from forerun.near import nearest


def plan_drafter(text: str, context: DraftContext) -> DraftPlan:
    """The drafter that the specification `text` spells.

    Raises UnknownDrafter for what does not parse, exist or fit together, VocabularyMismatch for a drafter whose
    tokens cannot be compared with the target's, and ModelError for a checkpoint that cannot be used.
    """
    return plan(parse_spec(text), context)


def plan(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """The same for a parsed specification."""
    planner = PLANNERS.get(spec.name)
    if planner is None:
        near = nearest(spec.name, PLANNERS)
        meant = f"did you mean {near}? Otherwise " if near else ""
        if spec.name in BUNDLED_DRAFTS:
            meant = f"did you mean {BUNDLED_DRAFTS[spec.name]}? Otherwise "
        elif spec.name in ("none", "off"):
            meant = "plain decoding is to name none; "
        raise UnknownDrafter(f"there is no drafter {spec.name!r}: {meant}choose one of {', '.join(sorted(PLANNERS))}")
    return planner(spec, context)


PLANNERS: Mapping[str, Callable[[DraftSpec, DraftContext], DraftPlan]] = {
    AUTO_DRAFT: lambda spec, context: plan(settled(spec, context.target), context),
    "block": plan_block,
    "cascade": lambda spec, context: plan_cascade(spec, context, plan),
    "eagle": plan_eagle,
    "early-exit": plan_early_exit,
    "medusa": plan_medusa,
    "mix": lambda spec, context: plan_mix(spec, context, plan),
    "model": plan_model,
    "mtp": plan_mtp,
    "ngram": plan_ngram,
    "suffix": plan_suffix,
}
