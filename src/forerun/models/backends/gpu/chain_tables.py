"""The tables of a graph of chains: its sizes, the tensors that it reads, and where tokens of all its passes lie.

`chain_graph.py` says what is computed over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.cache.paged import PagedCache
from forerun.device import HostArray, PackedTables, upload
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.fixed import PADDED, Inputs, Layout
from forerun.models.backends.gpu.ops import Ops
from forerun.models.backends.gpu.verdicts import holds
from forerun.models.chains import JudgedChains, Start, UnreadTexts
from forerun.models.decoder import Decoder
from forerun.models.runner import Read, Tail
from forerun.sampling.tables import Steps

LONGER = 1.5  # how many times its depth a round may be padded to, rather than that another graph is captured
FEW_ROWS = 16  # take a drafter as long as one
LEAST_TEXT = 16  # tokens


class ChainShape(NamedTuple):
    """The sizes of a graph: rows, depth, the tables of its transforms, and tokens of text that are read before."""

    rows: int
    depth: int
    steps: Steps
    text: int = 0

    def holds(self, other: ChainShape) -> bool:
        """Whether chains of another shape fit, without too much padding."""
        rows, text = max(FEW_ROWS, PADDED * other.rows), max(LEAST_TEXT, PADDED * other.text) if other.text else 0
        fits = other.rows <= self.rows <= rows and other.depth <= self.depth <= LONGER * other.depth
        return fits and other.text <= self.text <= text and holds(self.steps, other.steps)

    def size(self) -> tuple[int, int, Steps]:
        """What takes least comes first."""
        return self.rows * self.depth, self.text, self.steps


@dataclass(frozen=True, slots=True)
class Buffers:
    """The tensors of one graph: what chains begin with, and tables that are filled in one copy.

    These are the transforms' by name (`RoundTables.arrays`), each chain's `keys`, `positions` and root (`begins`),
    those of each pass, how many tokens further on a chain begins than these say (`advance`, 0 unless the device sets
    it), and by row of the round its root (`roots`), the number of its chain (`chains`) and how deep that is (`depths`),
    0 without one. Chains begin with `given` logits, or states of heads, or with `text` beside the
    target's states, `features`; masked `places` are read behind it. Layers below read roots and guesses in passes of
    their own.
    """

    packed: PackedTables
    passes: Sequence[Inputs]
    given: Float[Tensor, "rows numbers"] | None
    text: Inputs | None
    features: Float[Tensor, "text *features"] | None
    places: Inputs | None = None
    below: Sequence[Inputs] = ()


@runtime_checkable
class ReadingRunner(Protocol):
    """What of a GraphRunner is used here."""

    decoder: Decoder
    cache: PagedCache
    ops: Ops
    graphs: Graphs
    tails: dict[int, Tail]
    spare_slot: int
    most_keys: int

    @property
    def device(self) -> torch.device: ...

    @property
    def window(self) -> int: ...

    def length(self, seq_id: int) -> int: ...

    def lay_out(self, reads: Sequence[Read]) -> tuple[Layout, list[int]]: ...

    def keep(self, seq_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None: ...

    def drop(self, seq_ids: Sequence[int]) -> None: ...


def sources_of(texts: Sequence[Sequence[int]], order: Sequence[int], num_features: int) -> list[int]:
    """Where the states of all tokens are: those of texts are packed, and behind `num_features` are those of the roots
    that texts end with, in the order of the chains."""
    chains, sources, first = {i: chain for chain, i in enumerate(order)}, list[int](), 0
    for i, text in enumerate(texts):
        end = first + len(text) - 1
        sources += [*range(first, end), num_features + chains[i]]
        first = end
    return sources


def lay_out_steps(
    runner: ReadingRunner, name: str, steps: Sequence[Inputs], deepest_first: Sequence[Start]
) -> dict[str, HostArray]:
    """The tables of passes that read a token of each chain, as many as its depth says, by the names of these passes."""
    arrays = {}
    if steps:
        reads = [Read(start.seq_id, [0], judged=[0] if steps[0].shape.judged else []) for start in deepest_first]
        layout, judged = runner.lay_out(reads)
        numbers = steps[0].numbers(layout, judged, runner.cache.blocks.block_size, runner.spare_slot)
        for level, step in enumerate(steps):
            num_left = sum(start.depth > level for start in deepest_first)
            arrays[f"{name} {level}"] = step.later(numbers, level, num_left, runner.spare_slot)
        for start in deepest_first:
            runner.tails[start.seq_id].grow(None, start.depth - 1)
    return arrays


def set_by_verdict(buffers: Buffers, judged: JudgedChains, starts: Sequence[Start], device: torch.device) -> None:
    """Set what follows from a verdict on the chains of these starts: the text that it makes, and where chains begin."""
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


def below_of(texts: UnreadTexts | None) -> ReadingRunner | None:
    """The runner of the layers below, which is of the same kind as the one above it."""
    return None if texts is None else cast("ReadingRunner | None", texts.below)
