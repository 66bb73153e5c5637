"""The options of `forerun train` that define the drafter: its sizes, its exit, the checkpoint to continue from.

This file does not import torch, because the command line's help reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from forerun.config import require_whole
from forerun.errors import InvalidRequest

MOST_DEPTH = 16  # greatest depth of drafts in training


@dataclass(frozen=True, slots=True)
class StudentSizes:
    """The options of the drafter to train; None for defaults."""

    TITLE: ClassVar[str] = "Drafter"

    exit: Annotated[int | None, Option(help="early-exit: layers of the target that draft; default: a quarter.")] = None
    layers: Annotated[
        int | None, Option(help="Layers; default: 1, for block 2, for draft a quarter of the target's.")
    ] = None
    hidden: Annotated[int | None, Option(help="draft: width; default: half of the target's.")] = None
    heads: Annotated[
        int | None,
        Option(help="medusa: heads, one for each depth; default: 4. draft: attention heads; default: by the width."),
    ] = None
    mlp: Annotated[
        int | None, Option(help="Neurons per layer; default: the target's, for draft 11/4 of the width.")
    ] = None
    init: Annotated[str | None, Option(help="draft: a checkpoint to continue from.")] = None
    hydra: Annotated[
        bool | None, Option("--hydra", help="medusa: each head reads the draft tokens before its own.")
    ] = None
    shared_head: Annotated[
        bool | None, Option("--shared-head", help="medusa, eagle: use the target's output matrix.")
    ] = None
    draft_vocab: Annotated[
        int | None, Option(help="eagle, block, mtp: vocabulary of its head, the most frequent tokens; default: all.")
    ] = None
    block: Annotated[int | None, Option(help="block: draft tokens of a block; default: 8.")] = None
    markov_rank: Annotated[
        int | None, Option(help="block: rank of the Markov head, 0 for none; default: a quarter of the width.")
    ] = None
    selector_rank: Annotated[
        int | None, Option(help="block: rank of a candidate selector, in place of a Markov head.")
    ] = None
    confidence: Annotated[
        bool | None, Option("--confidence/--no-confidence", help="block: with or without a confidence head.")
    ] = None
    portable: Annotated[
        bool | None,
        Option("--portable", help="block, mtp: convertible to speculators (forerun convert); vLLM reads blocks."),
    ] = None
    tune_target: Annotated[Path | None, Option(help="medusa: tune the target too (Medusa-2), into this folder.")] = None
    taps: Annotated[
        str | None,
        Option(help="eagle, block: target layers, from 0, whose inputs it reads, as in 2,4; their number: its output."),
    ] = None

    def only(self, kind: str, *names: str) -> None:
        """Raise InvalidRequest if an option is set that is not among the `names` of this kind, or is out of range."""
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and each.name not in names:
                raise InvalidRequest(each.name, f"{value!r} is no option of {kind}, which has {options}.")
            if isinstance(value, int) and not isinstance(value, bool):
                require_whole(each.name, value, 0 if each.name.endswith("_rank") else 1)

    def tapped(self, num_layers: int) -> tuple[int, ...] | None:
        """The taps, each the index of the layer whose input it is; None if the option is not set.

        Raises InvalidRequest for layers that do not exist.
        """
        if self.taps is None:
            return None
        try:
            taps = tuple(int(each) for each in self.taps.split(","))
        except ValueError as error:
            problem = "must be numbers of layers between commas, such as 2,4."
            raise InvalidRequest("taps", f"{self.taps!r} {problem}") from error
        if len(set(taps)) < len(taps) or not all(0 <= tap <= num_layers for tap in taps):
            problem = f"must be different layers, from 0 to {num_layers}, such as 2,{num_layers}."
            raise InvalidRequest("taps", f"{self.taps!r} {problem}")
        return taps


def check_most(name: str, value: int, most: int) -> None:
    """Raise InvalidRequest for a value above `most`."""
    if value > most:
        raise InvalidRequest(name, f"{value} must be at most {most}.")
