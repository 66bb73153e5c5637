"""The tables of a chain graph: its sizes, its static tensors, and the cache slots of the tokens of all its passes.

`chain_graph.py` computes chains from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.device import HostArray, PackedTables, upload
from forerun.models.backends.gpu.fixed import PADDED, FixedRunner, Inputs
from forerun.models.backends.gpu.verdicts import holds
from forerun.models.chains import ChainStart, UnreadTexts, VerifiedChains
from forerun.models.runner import Read
from forerun.sampling.tables import Steps

LONGER = 1.5  # a round is padded to a captured graph of up to this many times its depth
FEW_ROWS = 16  # a drafter's pass takes as long for so many rows as for one
LEAST_TEXT = 16  # tokens


class ChainShape(NamedTuple):
    """The sizes of a chain graph: rows, depth, sampling transforms, and tokens of text that are read first."""

    rows: int
    depth: int
    steps: Steps
    text: int = 0

    def holds(self, other: ChainShape) -> bool:
        """Whether chains of shape `other` fit into this graph, without too much padding."""
        rows, text = max(FEW_ROWS, PADDED * other.rows), max(LEAST_TEXT, PADDED * other.text) if other.text else 0
        fits = other.rows <= self.rows <= rows and other.depth <= self.depth <= LONGER * other.depth
        return fits and other.text <= self.text <= text and holds(self.steps, other.steps)

    def size(self) -> tuple[int, int, Steps]:
        """The sort key by which the graph with the least work comes first."""
        return self.rows * self.depth, self.text, self.steps


@dataclass(frozen=True, slots=True)
class Buffers:
    """The static tensors of one chain graph; the tables in `packed` are filled in one copy.

    Tables: those of the sampling transforms (`RoundTables.arrays`) and of each pass; for each chain the key of its
    noise (`keys`), the position of its first draft token (`positions`), its root (`begins`), and the number of tokens
    by which it starts later (`advance`, 0 unless the device sets it); for each row of the round its root (`roots`), the
    index of its chain (`chains`), and the depth of that chain (`depths`, 0 without one).

    Chains start from `first` (logits, or the states that heads read), or from a pass over `text` with the target's
    states, `features`. Mask tokens (`places`) are read after it. Layers below read roots and draft tokens in the passes
    `below`.
    """

    packed: PackedTables
    passes: Sequence[Inputs]
    first: Float[Tensor, "rows numbers"] | None
    text: Inputs | None
    features: Float[Tensor, "text *features"] | None
    places: Inputs | None = None
    below: Sequence[Inputs] = ()


def sources_of(texts: Sequence[Sequence[int]], order: Sequence[int], num_features: int) -> list[int]:
    """The index of each text token's state: those of the texts are packed, and after `num_features` rows come those of
    the roots with which the texts end, in the order of the chains."""
    chains, sources, first = {i: chain for chain, i in enumerate(order)}, list[int](), 0
    for i, text in enumerate(texts):
        end = first + len(text) - 1
        sources += [*range(first, end), num_features + chains[i]]
        first = end
    return sources


def lay_out_steps(
    runner: FixedRunner, name: str, steps: Sequence[Inputs], deepest_first: Sequence[ChainStart]
) -> dict[str, HostArray]:
    """The tables of the passes that each read one token of every chain that is deep enough, by the passes' names."""
    arrays = {}
    if steps:
        reads = [Read(start.seq_id, [0], judged=[0] if steps[0].shape.judged else []) for start in deepest_first]
        layout, judged = runner.lay_out(reads)
        numbers = steps[0].numbers(layout, judged, runner.cache.blocks.block_size, runner.spare_slot)
        for level, step in enumerate(steps):
            num_left = sum(start.depth > level for start in deepest_first)
            arrays[f"{name} {level}"] = step.numbers_after(numbers, level, num_left, runner.spare_slot)
        for start in deepest_first:
            runner.tails[start.seq_id].grow(None, start.depth - 1)
    return arrays


def apply_verdict(buffers: Buffers, judged: VerifiedChains, starts: Sequence[ChainStart], device: torch.device) -> None:
    """Set, on the device, the tables that depend on the verdict: the tokens of the texts, and where chains start."""
    depth, rows = max(start.depth for start in starts), upload([start.row for start in starts], torch.long, device)
    tables, text = buffers.packed.tables, buffers.text
    assert text is not None, "chains that are launched ahead begin with text"
    accepted, drawn = judged.verdict[:, 0], judged.verdict[:, 1].clamp_min(0)
    tokens = functional.pad(judged.nodes[rows, 1 : 1 + depth], (0, 1))
    tokens.scatter_(1, accepted[rows, None], drawn[rows, None])
    read = [i * (depth + 1) + j for i, start in enumerate(starts) for j in range(start.depth + 1)]
    text.columns["tokens"][: len(read)] = tokens.flatten()[upload(read, torch.long, device)].clamp_min(0)
    tables["advance"][: len(rows)] = accepted[rows]
    tables["begins"][: len(rows)] = drawn[rows]
    tables["roots"][: len(drawn)] = drawn


def below_of(texts: UnreadTexts | None) -> FixedRunner | None:
    """The runner of the layers below, or None; its passes have fixed shapes too."""
    return None if texts is None else cast("FixedRunner | None", texts.below)
