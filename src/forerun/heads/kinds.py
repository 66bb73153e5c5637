"""The only table of the kinds of trained heads, by their names in `--draft`.

Each kind is a folder of this package, whose `drafter.py` declares its parts (`HeadParts` in blueprint.py). The table
defines how checkpoints and specifications of a kind are recognized. It does not import torch, because the command
line's help reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.fields import Fields


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of heads, in a folder of this package. `syntax` shows how to write its drafters in `--draft`.

    config.json identifies the kind by one of `keys`, pairs of a key and a text that its value contains. Every folder of
    the kind has the key `needed`. `argument` is a key whose value precedes the folder in `--draft`. `layout` is the
    format of `forerun convert` to recommend for weights that are not in safetensors.
    """

    folder: str
    syntax: str
    keys: tuple[tuple[str, str], ...] = ()
    needed: str | None = None
    argument: str | None = None
    layout: str | None = None

    def match(self, fields: Fields) -> bool:
        """Whether these are the fields of a folder of this kind."""
        values = {key: value for key, value in fields.values.items() if value is not None}
        return any(key in values and text in str(values[key]) for key, text in self.keys)


SPECULATORS = "speculators_model_type"  # the type of a drafter in the layout of speculators
HEADS: Mapping[str, HeadKind] = {
    "early-exit": HeadKind(
        "adapter", "early-exit:LAYERS[:DIR]", keys=(("exit_layer", ""),), needed="exit_layer", argument="exit_layer"
    ),
    "medusa": HeadKind(
        "medusa", "medusa:DIR", keys=(("medusa_num_heads", ""),), needed="medusa_num_heads", layout="medusa"
    ),
    "eagle": HeadKind("eagle", "eagle:DIR", keys=(("architectures", "Eagle"), (SPECULATORS, "eagle")), layout="eagle"),
    "block": HeadKind(
        "block", "block:DIR", keys=(("dflash_config", ""), ("architectures", "DFlash"), (SPECULATORS, "dflash"))
    ),
    "mtp": HeadKind("mtp", "mtp, mtp:DIR"),
}
