"""The name of a drafter wherever numbers measured with it are shown.

This file decides one thing: a widened checkpoint is shown with the name of its source, and as widened.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.draft.base import Drafter
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.models.loading import checkpoint_label


def draft_label(draft: str | Drafter | None) -> str:
    """A specification as spelled, with widened checkpoints named as such; a Drafter's arms; empty without a drafter."""
    if draft is None:
        return ""
    return str(labelled(parse_spec(draft))) if isinstance(draft, str) else "+".join(draft.arms)


def labelled(spec: DraftSpec) -> DraftSpec:
    """The specification with labels in place of the folders of widened checkpoints."""
    argument = spec.argument
    if spec.name == "model" and argument is not None:
        argument = checkpoint_label(argument)
    return replace(spec, argument=argument, members=tuple(labelled(member) for member in spec.members))
