"""What a trained drafter was found to be worth, in a file beside its weights, `drafter.json`.

This file decides what that file says: which target the drafter was trained for, by the target's weights, and what
held-out answers gave. `forerun train` writes it, and `auto.py` chooses by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import ForerunError
from forerun.fields import Fields, read_fields

RECORD = "drafter.json"


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """What held-out answers said of the drafter in a folder, at this temperature.

    `drafter` is its name and `argument` what its argument says before the folder: `2:` for `early-exit:2:DIR`.
    `target` is the digest of the target's weights. `tokens_per_round` is by depth from 1. `speed_up` is what was
    predicted at the best depth from rounds timed where it was trained, batch 1; None where none were timed.
    """

    drafter: str
    argument: str
    target: str
    temperature: float
    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]
    speed_up: float | None = None

    @classmethod
    def of(cls, draft: str, folder: Path, **found: Any) -> DrafterRecord:
        """The record of the drafter that the specification `draft` finds in `folder`."""
        spec = parse_spec(draft)
        assert spec.argument is not None, "a trained drafter names its folder"
        return cls(spec.name, spec.argument.removesuffix(str(folder)), **found)

    @classmethod
    def read(cls, folder: Path) -> DrafterRecord | None:
        """The record in a folder; None where there is none, or none that can be used."""
        try:
            fields = read_fields(folder / RECORD)
            return cls(
                drafter=str(fields.values["drafter"]),
                argument=str(fields.values["argument"]),
                target=str(fields.values["target"]),
                temperature=float(fields.values["temperature"]),
                acceptance_at_depth=numbers(fields, "acceptance_at_depth"),
                tokens_per_round=numbers(fields, "tokens_per_round"),
                speed_up=fields.optional("speed_up"),
            )
        except (ForerunError, KeyError, TypeError, ValueError):
            return None

    def spec(self, folder: Path) -> DraftSpec:
        """The specification of the drafter, which is in this folder."""
        return DraftSpec(self.drafter, argument=f"{self.argument}{folder}")

    def text(self) -> str:
        """What the file holds."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def untimed(self, target: str) -> DrafterRecord:
        """This worth for another target of the same law, where rounds take other times: no speed-up is known."""
        return replace(self, target=target, speed_up=None)


def numbers(fields: Fields, name: str) -> tuple[float, ...]:
    """A list of numbers, at least one."""
    values = fields.values[name]
    if not isinstance(values, list) or not values:
        raise fields.refuse(name, "it must be a list of numbers")
    return tuple(map(float, values))
