"""Widening: the new shape from the options, and the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.fields import read_fields
from forerun.models.config import UNITS, WIDENED, ModelConfig, amount
from forerun.models.projections import count_parameters
from forerun.models.widen import Wider

AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMB]?)", re.IGNORECASE)


def wider_of(config: ModelConfig, parameters: str | None, sizes: Mapping[str, int | None]) -> Wider:
    """The new shape, from a number of parameters or from sizes. Raises InvalidRequest for both, or for neither."""
    chosen = {name: size for name, size in sizes.items() if size is not None}
    if parameters is not None and chosen:
        raise InvalidRequest("parameters", "it determines all sizes: give either it or the sizes.")
    if parameters is not None:
        return Wider.of(config, read_amount(parameters))
    if not chosen:
        raise InvalidRequest("parameters", "no new size is given: give --parameters 0.5B, or sizes such as --hidden.")
    return Wider(**{"hidden": config.hidden, "layers": config.layers, **chosen})


def read_amount(text: str) -> int:
    """Parse a number of parameters: 21M, 0.5B, 500000."""
    match = AMOUNT.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest("parameters", f"{text!r} is not a number of parameters: write it like 21M or 0.5B.")
    return round(float(match[1]) * UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class Widened:
    """The result of widening: both shapes, the folder, and the widened drafters."""

    source: ModelConfig
    wide: ModelConfig
    folder: Path
    drafts: Sequence[str] = ()

    @property
    def check(self) -> Mapping[str, Any]:
        """The comparison of both models' logits, stored when the checkpoint was written."""
        numbers: Mapping[str, Any] = read_fields(self.folder / "config.json").values[WIDENED]["check"]
        return numbers

    def facts(self) -> Iterator[tuple[str, str]]:
        """(name, fact) of the result."""
        yield "from", describe(self.source)
        yield "to", describe(self.wide)
        difference, allowed, largest = (self.check[key] for key in ("largest_difference", "tolerance", "largest_logit"))
        yield "logits", f"differ by at most {difference:.2g} ({allowed:.2g} allowed, the largest is {largest:.3g})"
        yield "folder", str(self.folder)
        yield from (("drafter", f"--draft {draft}") for draft in self.drafts)

    def as_object(self) -> dict[str, Any]:
        """The result as JSON."""
        shapes = {"from": shape_object(self.source), "to": shape_object(self.wide)}
        return {**shapes, "check": dict(self.check), "folder": str(self.folder), "drafts": list(self.drafts)}


def shape_object(config: ModelConfig) -> dict[str, int]:
    """A model's size and shape, under the names of the options."""
    c, e = config, config.experts
    shape = {
        "parameters": count_parameters(c),
        "hidden": c.hidden,
        "layers": c.layers,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "mlp": c.intermediate,
        "vocab_size": c.vocab_size,
    }
    return shape if e is None else shape | {"experts": e.count, "active": e.active}


def describe(config: ModelConfig) -> str:
    """A model's size and shape in one line."""
    heads = f"{config.heads} heads ({config.kv_heads} KV heads)"
    e = config.experts
    experts = "" if e is None else f" ({e.count} experts of {e.intermediate}, {e.active} per token)"
    shape = f"hidden size {config.hidden}, {config.layers} layers, {heads}, MLP width {config.intermediate}{experts}"
    return f"{amount(count_parameters(config))} parameters: {shape}, vocabulary {config.vocab_size}"
