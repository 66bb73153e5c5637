"""PassAhead and ChainsAhead: the next round's pass or chains, launched before the host has the verdict.

Where nothing is drafted, the next round reads the token that each sequence draws in this one, and the device knows it
first. It goes on with it while the host makes the round final. The next round takes the pass if it asks for nothing
else; if not, the pass is forgotten, and what it wrote lies behind the committed text.

Where chains are drafted, the next ones begin behind what the verdict accepts. They are laid out as if nothing were
accepted, and the device adds how many guesses were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import DeviceSpan, Download, upload
from forerun.models.backends.gpu.fixed import Layout
from forerun.models.chains import JudgedChains, Start
from forerun.models.decoder import States
from forerun.sampling.draws import Draws

PAUSE = 32  # rounds without one behind a pass that was not taken, which has cost as much as a round
CHAINS_PAUSE = 4  # the same of chains, which have cost less


@dataclass(frozen=True, slots=True)
class PassAhead:
    """One row for each sequence, which reads the token behind the length in its row of `verdict`.

    `num_runs` is how often the runner's graphs had run when it was launched: later ones overwrite its `outputs`.
    """

    seq_ids: Sequence[int]
    layout: Layout
    taps: tuple[int, ...]
    verdict: Download
    outputs: States
    span: DeviceSpan | None
    num_runs: int

    def rows_for(self, seq_ids: Sequence[int], layout: Layout) -> list[int] | None:
        """Which of its rows these reads ask for, in their order; None if they ask for anything else.

        Sequences that have ended in the meantime are left out.
        """
        places = {seq_id: row for row, seq_id in enumerate(self.seq_ids)}
        rows = [places[seq_id] for seq_id in seq_ids if seq_id in places]
        drawn = [numbers[1] for numbers in self.verdict.values]
        there = self.layout
        ahead = [(drawn[row], there.positions[row], there.slots[row], there.starts[row]) for row in rows]
        asked = [*zip(layout.tokens, layout.positions, layout.slots, layout.starts, strict=False)]
        return rows if ahead == asked and len(rows) == len(layout.tokens) else None


@dataclass(frozen=True, slots=True)
class ChainsAhead:
    """Chains of these starts behind a judged round, as one graph gave them.

    `arriving` brings the verdict and, behind it, the tokens of the judged trees. `lengths` are how many tokens of each
    start's text were read before, and `slots` where these lay, by sequence. Later runs of the graphs overwrite `nodes`
    and `ends`.
    """

    judged: JudgedChains
    starts: Sequence[Start]
    lengths: Sequence[int]
    slots: dict[int, int]
    arriving: Download
    nodes: Int[Tensor, "2 rows nodes"]
    ends: Float[Tensor, "rows outputs"] | None
    num_runs: int

    def rows_for(
        self, draws: Draws, starts: Sequence[Start], texts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[int] | None:
        """Which rows of that round these draws are of, in their order; None if these starts ask for other chains.

        `texts` are the unread ones behind `lengths` tokens. Sequences that have ended in the meantime are left out, and
        chains may be asked for that are not as deep.
        """
        before, verdicts = self.judged.draws, self.arriving.values
        row_of = {seq_id: row for row, seq_id in enumerate(before.seq_ids)}
        rows = [row_of[seq_id] for seq_id in draws.seq_ids if seq_id in row_of]
        if len(rows) != len(draws.rows) or draws.num_ids != before.num_ids:
            return None
        if draws.root_places != [before.root_places[row] + 1 + verdicts[row][0] for row in rows]:
            return None
        made = {start.seq_id: (start, length) for start, length in zip(self.starts, self.lengths, strict=True)}
        for asked, text, length in zip(starts, texts, lengths, strict=True):
            start, before_text = made.get(asked.seq_id, (asked, -1))
            if before_text != length or asked.depth > start.depth or [*text] != self.text_of(start.row):
                return None
        return rows

    def outputs_of(
        self, rows: Sequence[int], starts: Sequence[Start]
    ) -> tuple[Int[Tensor, "2 rows nodes"], Float[Tensor, "rows outputs"] | None]:
        """Nodes and ends of these rows, in their order, with chains no deeper than these starts ask for."""
        if ([*rows], [*starts]) == ([*range(len(rows))], [*self.starts]):  # no sequence has ended, or will soon
            return self.nodes, self.ends
        depths = {start.row: start.depth for start in starts}
        at, last = upload([[*rows], [depths.get(i, 0) for i in range(len(rows))]], torch.long, self.nodes.device)
        inside = torch.arange(self.nodes.shape[2], device=at.device) <= last[:, None]
        return torch.where(inside, self.nodes[:, at], -1), None if self.ends is None else self.ends[at]

    def text_of(self, row: int) -> list[int]:
        """What the verdict has made final of a row: the accepted guesses and the token behind them."""
        first, numbers = self.judged.verdict.shape[1] + 1, self.arriving.values[row]
        return [*numbers[first : first + numbers[0]], numbers[1]]
