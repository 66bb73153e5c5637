"""The tuning of a server: its measurements, conclusions, what remains unknown, and the JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.machine import disturbance
from forerun.remote.counters import ServedAcceptance
from forerun.remote.dialects import Dialect
from forerun.remote.forecast import ServedCell, advice_of, cell_of, predicted_slower_from, slower_from
from forerun.remote.measure import PLAIN, ServedBlock, ServedContender, ServerPlan
from forerun.report import json_object


@dataclass(frozen=True, slots=True)
class ServerTuning:
    """The results of tuning a server, a cell for each number of clients."""

    url: str
    model: str
    dialect: Dialect
    against: str | None
    plan: ServerPlan
    cells: tuple[ServedCell, ...]
    num_busy: float | None

    @classmethod
    def of(cls, contenders: Sequence[ServedContender], plan: ServerPlan, blocks: Sequence[ServedBlock]) -> ServerTuning:
        """The results from the contenders' blocks."""
        server = contenders[0].server
        against = next((each.server.client.address.base for each in contenders if each.name == PLAIN), None)
        by_load = {n: [b for b in blocks if b.block.turn.load.value == n] for n in plan.clients}
        return cls(
            server.client.address.base,
            server.model.name,
            server.dialect,
            against,
            plan,
            tuple(cell_of(clients, blocks) for clients, blocks in by_load.items()),
            max((block.num_busy for block in blocks if block.num_busy is not None), default=None),
        )

    @property
    def acceptance(self) -> ServedAcceptance | None:
        """The acceptance at the first load; None if unknown."""
        return self.cells[0].speculating.acceptance

    @property
    def unknown(self) -> list[str]:
        """What cannot be determined from these servers, as phrases."""
        phrases, seen = [], self.acceptance
        hint = f": {self.dialect.counters_advice}" if self.dialect.counters_advice else ""
        if self.against is None:
            phrases.append("the speed-up: name a server of the same model without speculation with --against URL")
        if seen is None:
            phrases.append(
                f"acceptance, the cost of rounds, and other depths: the server does not report its draft tokens{hint}"
            )
        elif seen.reached is None:
            phrases.append(
                "acceptance by depth, and the best depth: the server does not report accepted draft tokens by "
                f"depth{hint}"
            )
        phrases.append("the separate times of the target's and the drafter's passes: only ratios of rounds are known")
        return phrases

    @property
    def undecided(self) -> str:
        """Why the figures are no evidence for or against a setting; "" if they are."""
        return disturbance(self.num_busy)

    def as_object(self) -> dict[str, Any]:
        """The tuning as JSON: seconds, shares between 0 and 1, and null for unknown values."""
        slower = None if self.undecided else slower_from(self.cells)
        return json_object(
            url=self.url,
            model=self.model,
            engine=self.dialect.name,
            against=self.against,
            plan=self.plan,
            hurts_from_clients=slower and slower.clients,
            expected_to_hurt_from_clients=None if self.undecided else predicted_slower_from(self.cells),
            cells=[self.cell_object(cell) for cell in self.cells],
            unknown=self.unknown,
            num_busy_cores=self.num_busy,
            undecided=self.undecided or None,
        )

    def cell_object(self, cell: ServedCell) -> dict[str, Any]:
        """One load as JSON, with the recommended depth (null: the current setting) and its options."""
        advice = None if self.undecided else advice_of(cell)
        return {
            **asdict(cell),
            "served_depth": cell.served_depth,
            "advice": advice,
            "options": None if not advice or advice.depth is None else self.dialect.options(advice.depth),
        }
