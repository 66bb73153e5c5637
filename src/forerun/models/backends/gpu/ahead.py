"""PassAhead and ChainsAhead: the next round's pass or chains, launched before the host has the verdict.

Without drafts, the next round reads the token that each sequence samples in this round, which the device knows before
the host. So the device starts the next pass while the host still finishes the round. The next round uses the outputs if
it needs exactly this pass; otherwise they are discarded, and later passes overwrite the keys and values of the pass,
which are after the committed text.

With drafts, the next chains start after the tokens that the verdict accepts. The host lays them out as if no draft
token were accepted, and the device adds the number of accepted tokens to their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import DeviceSpan, Download, upload
from forerun.models.backends.gpu.fixed import Layout
from forerun.models.chains import ChainStart, VerifiedChains
from forerun.models.decoder import Outputs
from forerun.sampling.draws import Draws

PAUSE = 32  # rounds without a pass ahead after an unused one, which costs as much as a round
CHAINS_PAUSE = 4  # rounds without chains ahead after unused ones, which cost less


@dataclass(frozen=True, slots=True)
class PassAhead:
    """A pass with one row for each sequence, which reads the token that the sequence's row of `verdict` has sampled.

    `num_runs` is the number of graph runs of the runner at the launch; any later run overwrites `outputs`.
    """

    seq_ids: Sequence[int]
    layout: Layout
    taps: tuple[int, ...]
    verdict: Download
    outputs: Outputs
    span: DeviceSpan | None
    num_runs: int

    def rows_for(self, seq_ids: Sequence[int], layout: Layout) -> list[int] | None:
        """The rows of this pass that a pass of this `layout` needs, in its order; None if it needs anything else.

        Sequences that have ended since the launch may be missing.
        """
        row_of = {seq_id: row for row, seq_id in enumerate(self.seq_ids)}
        rows = [row_of[seq_id] for seq_id in seq_ids if seq_id in row_of]
        drawn, ahead = [numbers[1] for numbers in self.verdict.values], self.layout
        launched = [(drawn[row], ahead.positions[row], ahead.slots[row], ahead.starts[row]) for row in rows]
        needed = [*zip(layout.tokens, layout.positions, layout.slots, layout.starts, strict=False)]
        return rows if launched == needed and len(rows) == len(layout.tokens) else None


@dataclass(frozen=True, slots=True)
class ChainsAhead:
    """Chains of these `starts` after a verified round, drafted by one graph run.

    `arriving` is the copy to the host of the verdict, followed in each row by the tokens of the verified trees.
    `lengths` are the numbers of tokens of each start that were read before, and `slots` the first cache slots by
    sequence. Any later graph run (`num_runs`) overwrites `nodes` and `ends`.
    """

    judged: VerifiedChains
    starts: Sequence[ChainStart]
    lengths: Sequence[int]
    slots: dict[int, int]
    arriving: Download
    nodes: Int[Tensor, "2 rows nodes"]
    ends: Float[Tensor, "rows outputs"] | None
    num_runs: int

    def rows_for(
        self, draws: Draws, starts: Sequence[ChainStart], texts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[int] | None:
        """The rows of the verified round that these draws continue, in their order; None if other chains are needed.

        `texts` are the unread tokens after the first `lengths`. Sequences that have ended since the launch may be
        missing, and the chains needed may be shorter.
        """
        before, verdicts = self.judged.draws, self.arriving.values
        row_of = {seq_id: row for row, seq_id in enumerate(before.seq_ids)}
        rows = [row_of[seq_id] for seq_id in draws.seq_ids if seq_id in row_of]
        if len(rows) != len(draws.rows) or draws.num_ids != before.num_ids:
            return None
        if draws.root_places != [before.root_places[row] + 1 + verdicts[row][0] for row in rows]:
            return None
        launched = {start.seq_id: (start, length) for start, length in zip(self.starts, self.lengths, strict=True)}
        for needed, text, length in zip(starts, texts, lengths, strict=True):
            start, num_read = launched.get(needed.seq_id, (needed, -1))
            if num_read != length or needed.depth > start.depth or [*text] != self.final_tokens(start.row):
                return None
        return rows

    def outputs_of(
        self, rows: Sequence[int], starts: Sequence[ChainStart]
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """`nodes` and `ends` of these rows, in their order, with the chains cut to the depths of `starts`."""
        if ([*rows], [*starts]) == ([*range(len(rows))], [*self.starts]):  # the same rows and depths
            return self.nodes, self.ends
        depths = {start.row: start.depth for start in starts}
        at, last = upload([[*rows], [depths.get(i, 0) for i in range(len(rows))]], torch.long, self.nodes.device)
        inside = torch.arange(self.nodes.shape[2], device=at.device) <= last[:, None]
        return torch.where(inside, self.nodes[:, at], -1), None if self.ends is None else self.ends[at]

    def final_tokens(self, row: int) -> list[int]:
        """The tokens of a row that the verdict made final: the accepted draft tokens and the token after them."""
        first, numbers = self.judged.verdict.shape[1] + 1, self.arriving.values[row]
        return [*numbers[first : first + numbers[0]], numbers[1]]
