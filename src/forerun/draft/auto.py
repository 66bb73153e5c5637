"""Trained drafters: the record of each (`drafter.json`), and `auto`, which chooses the best one found near the target.

`drafter.json` next to a drafter's weights says which target it was trained for, by hashes of the target's weights, and
the results on held-out answers. `auto` looks in the target's folder, in sibling folders, and among the drafters that
ship with forerun, for records of this target: of these very weights, or of the model in another number format. Without
any it takes the MTP modules that the target ships. The choice uses the recorded results and loads nothing; how deep
drafts go, and whether they pay on this machine, is decided by the controller.
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
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import ForerunError, UnknownDrafter
from forerun.fields import Fields, read_fields
from forerun.models.bundled import FOLDER as SHIPPED
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import find_modules
from forerun.models.projections import layer_tensors

AUTO_DRAFT = "auto"
MODULES = DraftSpec("mtp")  # of the target's own checkpoint, where nothing that pays lies beside it
OTHERWISE = DraftSpec("suffix")  # where it has none either: it needs no weights
RECORD = "drafter.json"
NAMES = ("ngram", "suffix", "model", "early-exit", "medusa", "eagle", "block", "mtp")  # that a record may have

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """The results of the drafter in a folder on held-out answers, at this temperature.

    `drafter` is its name and `argument` the part of its argument before the folder: `2:` for `early-exit:2:DIR`.
    `target` is the digest of the target's weights, and `model`, if known, that of its norms, which are the same in all
    number formats. `mixed_with` is a drafter without weights to combine it with in a mix: `auto` takes both.
    `tokens_per_round` is by depth from 1. `speed_up` was predicted at the best depth from rounds timed where it was
    trained, at batch size 1; None if none were timed.
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
    def of(cls, draft: str, folder: Path, **found: Any) -> DrafterRecord:
        """The record of the drafter with the specification `draft`, whose weights are in `folder`."""
        spec = parse_spec(draft)
        assert spec.argument is not None, "a trained drafter names its folder"
        return cls(spec.name, spec.argument.removesuffix(str(folder)), **found)

    @classmethod
    def read(cls, folder: Path) -> DrafterRecord | None:
        """The record in a folder; None without a valid one."""
        try:
            fields = read_fields(folder / RECORD)
            mixed_with = fields.text("mixed_with")
            if mixed_with is not None:
                parse_spec(mixed_with)
            return cls(
                drafter=str(fields.values["drafter"]),
                argument=str(fields.values["argument"]),
                target=str(fields.values["target"]),
                temperature=float(fields.values["temperature"]),
                acceptance_at_depth=numbers(fields, "acceptance_at_depth"),
                tokens_per_round=numbers(fields, "tokens_per_round"),
                speed_up=fields.optional("speed_up"),
                model=fields.values.get("model"),
                mixed_with=mixed_with,
            )
        except (ForerunError, KeyError, TypeError, ValueError, OverflowError):
            return None

    def spec(self, folder: Path) -> DraftSpec:
        """The specification of the drafter, which is in this folder."""
        return DraftSpec(self.drafter, argument=f"{self.argument}{folder}")

    def best_spec(self, folder: Path) -> DraftSpec:
        """The drafter in a mix with `mixed_with`, if there is one."""
        bundled = self.spec(folder)
        return bundled if self.mixed_with is None else DraftSpec("mix", members=(parse_spec(self.mixed_with), bundled))

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, indent=2) + "\n"

    def untimed(self, target: str) -> DrafterRecord:
        """These results for another target with the same distribution but other times: without a speed-up."""
        return replace(self, target=target, model=None, speed_up=None)


def numbers(fields: Fields, name: str) -> tuple[float, ...]:
    """A list of numbers, at least one."""
    values = fields.values[name]
    if not isinstance(values, list) or not values:
        raise fields.refuse(name, "it must be a list of numbers")
    return tuple(map(float, values))


PathAndRecord = tuple[Path, DrafterRecord]


def settled_draft(draft: str | Drafter | None, target: Blueprint) -> str | Drafter | None:
    """The engine's drafter specification, after `auto` was replaced for this target."""
    return str(settled(parse_spec(draft), target)) if isinstance(draft, str) else draft


def settled(spec: DraftSpec, target: Blueprint, alone: bool = True) -> DraftSpec:
    """The specification with the drafter chosen for this target in place of every `auto`. An `auto` that stands
    `alone`, outside of a mix, may become a mix.
    """
    if spec.name != AUTO_DRAFT:
        return replace(spec, members=tuple(settled(member, target, alone=False) for member in spec.members))
    if spec.argument is not None or spec.members:
        raise UnknownDrafter(f"{spec}: auto chooses what lies beside the target: write it without an argument")
    best = chosen(list(beside(target)))
    if best is None:
        return MODULES if ships_modules(target) else OTHERWISE
    return best[1].best_spec(best[0]) if alone else best[1].spec(best[0])


def ships_modules(target: Blueprint) -> bool:
    """Whether a target ships MTP modules whose layers are its own."""
    stored, last = target.checkpoint(target.dtype).stored, target.config.layers - 1
    modules = find_modules(stored, target.config.layers)
    if modules is None:
        return False
    place = modules.naming.layer.format(modules.naming.number(0, target.config.layers))
    shapes = layer_tensors(target.config, last).items()
    return all(f"{place}{name}" in stored and stored[f"{place}{name}"].shape == shape for name, shape in shapes)


def beside(target: Blueprint) -> Iterator[PathAndRecord]:
    """The drafters for this target in its folder, in sibling folders, or shipped with forerun, each once, by name."""
    digest, model = cache(target.weights_digest), cache(target.norms_digest)
    files = {file.resolve().parent for file in target.weight_files}  # of a file that stands for a folder, its own place
    places = [target.folder, target.folder.resolve().parent, *sorted(files), *sorted(SHIPPED.iterdir())]
    records = {path.resolve(): path for place in places for path in sorted(place.glob(f"*/{RECORD}"))}
    for path in records.values():
        record = DrafterRecord.read(path.parent)
        if record is None or (record.target != digest() and (record.model is None or record.model != model())):
            continue
        names = (record.drafter, *(() if record.mixed_with is None else (parse_spec(record.mixed_with).name,)))
        if unknown := next((name for name in names if name not in NAMES), None):
            log.warning("%s is left out: it needs the drafter %s, which this version does not have", path, unknown)
            continue
        yield path.parent, record


def chosen(found: list[PathAndRecord]) -> PathAndRecord | None:
    """The best of these: of the timed ones the one with the greatest predicted speed-up, if above 1; else, of the
    untimed ones, the one with the most tokens per round; None without either.
    """
    timed = [each for each in found if (each[1].speed_up or 0) > 1]
    if timed:
        return max(timed, key=lambda each: each[1].speed_up or 0)
    unknown = [each for each in found if each[1].speed_up is None]
    return max(unknown, key=lambda each: max(each[1].tokens_per_round), default=None)
