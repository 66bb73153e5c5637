"""PassAhead: the next round's pass, launched before the host knows which tokens it reads.

Where nothing is drafted, the next round reads the token that each sequence draws in this one, and the device knows it
first. It goes on with it while the host makes the round final. The next round takes the pass if it asks for nothing
else; if not, the pass is forgotten, and what it wrote lies behind the committed text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.device import DeviceSpan, Download
from forerun.models.backends.gpu.fixed import Layout
from forerun.models.decoder import States

PAUSE = 32  # rounds without one behind a pass that was not taken, which has cost as much as a round


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
