"""`auto`: the best of the trained drafters that lie beside the target.

This file decides where they are looked for, and which one is the best. Beside a target are the folders inside its own
folder and those next to it, as far as they hold a `drafter.json` (`record.py`) written for these very weights. What a
drafter is worth is read there and not measured again, so choosing loads nothing; how deep drafts go, and whether they
pay on this machine, remains the controller's question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from forerun.draft.base import Drafter
from forerun.draft.record import RECORD, DrafterRecord
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import UnknownDrafter
from forerun.models.loading import Blueprint

AUTO_DRAFT = "auto"
OTHERWISE = DraftSpec("suffix")  # where nothing that pays lies beside the target: it needs no weights
Found = tuple[Path, DrafterRecord]


def settled_draft(draft: str | Drafter | None, target: Blueprint) -> str | Drafter | None:
    """What an engine is asked to draft with, after the choice for this target."""
    return str(settled(parse_spec(draft), target)) if isinstance(draft, str) else draft


def settled(spec: DraftSpec, target: Blueprint) -> DraftSpec:
    """The specification with the drafter chosen for this target in the place of every `auto`."""
    if spec.name != AUTO_DRAFT:
        return replace(spec, members=tuple(settled(member, target) for member in spec.members))
    if spec.argument is not None or spec.members:
        raise UnknownDrafter(f"{spec}: auto chooses what lies beside the target: write it without an argument")
    best = chosen(list(beside(target)))
    return OTHERWISE if best is None else best[1].spec(best[0])


def beside(target: Blueprint) -> Iterator[Found]:
    """The drafters trained for these weights that lie in the target's folder or next to it, by name."""
    folder, digest = target.folder, ""
    for place in (folder, folder.resolve().parent):
        for path in sorted(place.glob(f"*/{RECORD}")):
            record = DrafterRecord.read(path.parent)
            digest = digest or target.weights_digest()
            if record is not None and record.target == digest:
                yield path.parent, record


def chosen(found: list[Found]) -> Found | None:
    """The best of these: of those whose rounds were timed the one with the greatest predicted speed-up, if that is one;
    then, of those that nobody timed, the one with the most tokens per round; None where neither is there."""
    timed = [each for each in found if (each[1].speed_up or 0) > 1]
    if timed:
        return max(timed, key=lambda each: each[1].speed_up or 0)
    unknown = [each for each in found if each[1].speed_up is None]
    return max(unknown, key=lambda each: max(each[1].tokens_per_round), default=None)
