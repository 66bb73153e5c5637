"""The name of a drafter wherever numbers measured with it are shown.

This file decides one thing: a widened checkpoint is shown with the name of its source, and as widened.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.draft.base import Drafter
from forerun.draft.model.widen import KINDS
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.fields import read_fields
from forerun.models.config import read_widened
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
    elif spec.name in KINDS and argument is not None:
        lead, colon, folder = argument.partition(":") if spec.name == "early-exit" else ("", "", argument)
        argument = f"{lead}{colon}{head_label(folder)}"
    return replace(spec, argument=argument, members=tuple(labelled(member) for member in spec.members))


def head_label(folder: str) -> str:
    """What heads are called: by their name or, if they were widened, by that of their source; nothing without any."""
    if not folder:
        return folder
    path = Path(folder) / "config.json"
    return (read_widened(read_fields(path)) if path.is_file() else None) or folder
