"""The records of trained drafters (`drafter.json`), and `auto`, which chooses the best drafter found for a target.

`drafter.json` next to a drafter's weights names the target that it was trained for, by hashes of the target's weights,
and its results on held-out answers. `auto` searches the target's folder, its sibling folders, and the drafters that
ship with forerun, for records of this target: of the same weights, or of the same model in another number format. If
there are none it uses the target's own MTP modules. The choice follows the recorded results and loads no weights. The
controller decides later how deep drafts go, and whether they save time on this machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.draft.base import Drafter
from forerun.draft.spec import DraftSpec, parse_spec, refuse_code
from forerun.errors import ForerunError, UnknownDrafter
from forerun.fields import read_fields
from forerun.models.bundled import FOLDER as SHIPPED
from forerun.models.bundled import bundled_name
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import find_modules
from forerun.models.projections import layer_tensors
from forerun.stored import of_json

AUTO_DRAFT = "auto"
MTP_MODULES = DraftSpec("mtp")  # of the target's own checkpoint: if no record qualifies
NO_WEIGHTS = DraftSpec("suffix")  # if the target has no MTP modules either
RECORD = "drafter.json"
NAMES = ("ngram", "suffix", "model", "early-exit", "medusa", "eagle", "block", "mtp")  # drafters that a record may name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """The results of the drafter in a folder on held-out answers, at this temperature.

    `drafter` is its name and `argument` the part of its argument before the folder: `2:` for `early-exit:2:DIR`.
    `target` is the digest of the target's weights; `model`, if known, is the digest of its norms, which are equal in
    all number formats. `mixed_with` names a drafter without weights: `auto` then chooses a mix of both.
    `tokens_per_round` is by depth, from 1. `speed_up` is the prediction at the best depth, at batch size 1, from rounds
    timed on the machine where the drafter was trained; None if no rounds were timed.
    """

    drafter: str
    argument: str
    target: str
    temperature: float
    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]
    speed_up: float | None = None
    model: str | None = None
    mixed_with: str | None = None

    @classmethod
    def of(cls, draft: str, folder: Path, **results: Any) -> DrafterRecord:
        """The record of the drafter with the specification `draft`, whose weights are in `folder`."""
        spec = parse_spec(draft)
        assert spec.argument is not None, "a trained drafter names its folder"
        return cls(spec.name, spec.argument.removesuffix(str(folder)), **results)

    @classmethod
    def read(cls, folder: Path) -> DrafterRecord | None:
        """The record in a folder; None if there is no valid record."""
        try:
            record: DrafterRecord = of_json(cls, read_fields(folder / RECORD).values)
            if record.mixed_with is not None:
                parse_spec(record.mixed_with)
        except (ForerunError, ValueError):
            return None
        return record if record.acceptance_at_depth and record.tokens_per_round else None

    @property
    def rank(self) -> tuple[int, float]:
        """A sort key: first drafters that save no time, then those without a speed-up, by their tokens per round."""
        if self.speed_up is None:
            return 1, max(self.tokens_per_round)
        return 2 * (self.speed_up > 1), self.speed_up

    def spec(self, folder: Path) -> DraftSpec:
        """The specification of the drafter alone, whose weights are in this folder."""
        return DraftSpec(self.drafter, argument=f"{self.argument}{bundled_name(folder)}")

    def best_spec(self, folder: Path) -> DraftSpec:
        """The specification of the drafter in a mix with `mixed_with`, if that is set."""
        alone = self.spec(folder)
        return alone if self.mixed_with is None else DraftSpec("mix", members=(parse_spec(self.mixed_with), alone))

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, indent=2) + "\n"

    def untimed(self, target: str) -> DrafterRecord:
        """This record without a speed-up, for another target with the same distribution but other times."""
        return replace(self, target=target, model=None, speed_up=None)


PathAndRecord = tuple[Path, DrafterRecord]


def resolved_draft(draft: str | Drafter | None, target: Blueprint) -> str | Drafter | None:
    """The engine's drafter, with every `auto` in a specification replaced for this target."""
    return str(resolve_auto(parse_spec(draft), target)) if isinstance(draft, str) else draft


def resolve_auto(spec: DraftSpec, target: Blueprint, alone: bool = True) -> DraftSpec:
    """The specification with the drafter chosen for this target in place of every `auto`.

    Only an `auto` that is `alone`, not a member of another drafter, may become a mix.
    """
    if spec.name != AUTO_DRAFT:
        return replace(spec, members=tuple(resolve_auto(member, target, alone=False) for member in spec.members))
    if spec.argument is not None or spec.members:
        raise UnknownDrafter(f"{spec}: auto finds drafters near the target by itself: write auto without an argument")
    useful = (each for each in records_of(target) if each[1].rank[0])
    best = max(useful, key=lambda each: each[1].rank, default=None)
    if best is None:
        return MTP_MODULES if has_mtp_modules(target) else NO_WEIGHTS
    return best[1].best_spec(best[0]) if alone else best[1].spec(best[0])


def has_mtp_modules(target: Blueprint) -> bool:
    """Whether the target's checkpoint has MTP modules with layers of the target's own kind and shapes."""
    stored, last = target.checkpoint(target.dtype).stored, target.config.layers - 1
    modules = find_modules(stored, target.config.layers)
    if modules is None:
        return False
    place = modules.naming.layer.format(modules.naming.number(0, target.config.layers))
    shapes = layer_tensors(target.config, last).items()
    return all(f"{place}{name}" in stored and stored[f"{place}{name}"].shape == shape for name, shape in shapes)


def records_of(target: Blueprint) -> Iterator[PathAndRecord]:
    """The records for this target in its folder, in sibling folders, or shipped with forerun, each folder once."""
    digest, model = cache(target.weights_digest), cache(target.norms_digest)
    files = {file.resolve().parent for file in target.weight_files}  # the folder of a target that is a single file
    places = [target.folder, target.folder.resolve().parent, *sorted(files), *sorted(SHIPPED.iterdir())]
    records = {path.resolve(): path for place in places for path in sorted(place.glob(f"*/{RECORD}"))}
    for path in records.values():
        record = DrafterRecord.read(path.parent)
        if record is None or (record.target != digest() and (record.model is None or record.model != model())):
            continue
        spec = record.best_spec(path.parent)
        refuse_code(spec, str(path), "delete this file, and trust nothing that came with it")
        names = (record.drafter, *(() if record.mixed_with is None else (parse_spec(record.mixed_with).name,)))
        if unknown := next((name for name in names if name not in NAMES), None):
            log.warning("%s is ignored: it names the drafter %s, which this version does not have", path, unknown)
            continue
        yield path.parent, record
