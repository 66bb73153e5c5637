"""Cells: one contender at one number of requests at once in one repetition; how it is measured, and where it is kept.

This file decides what a cell sends and when it counts as failed. Requests are sent by `forerun.traffic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.processes import StepFailed
from benchmarks.run_file import RunFile

from forerun.bench.material import Passage, mixed_passages
from forerun.models.bundled import TARGET
from forerun.models.loading import Blueprint
from forerun.traffic.client import ServerAddress, TimedAnswer, TrafficClient
from forerun.traffic.figures import percentile
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn
from forerun.traffic.run import Sender

STRIDE = 7  # tokens between the beginnings of two prompts of one text
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What all contenders are sent at every number of clients: so many requests of each, one after another."""

    prompt_tokens: int
    answer_tokens: int
    per_client: int

    def plan(self, concurrency: int, mode: str) -> TrafficPlan:
        """As the plan of a load test; answers have full length."""
        return TrafficPlan(
            (ServerLoad("concurrency", float(concurrency)),),
            (SpeculationMode(mode),),
            num_requests=concurrency * self.per_client,
            repeats=1,
            max_tokens=self.answer_tokens,
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which cell it is."""

    concurrency: int
    repetition: int
    contender: str


@dataclass(frozen=True, slots=True)
class ServedCell:
    """A finished cell: `answers` by number of the request, and the seconds until the last of them was over."""

    key: CellKey
    seconds: float
    answers: tuple[TimedAnswer, ...]

    @property
    def num_failed(self) -> int:
        """Requests without a complete answer."""
        return sum(bool(answer.error) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of complete answers over the time of the cell."""
        return sum(answer.num_tokens for answer in self.answers if not answer.error) / self.seconds

    def first_token_s(self, share: float) -> float:
        """A percentile of the times to the first token, over complete answers."""
        return percentile([answer.first_token_s for answer in self.answers if not answer.error], share)

    def latency_s(self, share: float) -> float:
        """A percentile of the times to the last token, over complete answers."""
        return percentile([answer.total_s for answer in self.answers if not answer.error], share)


def cut_prompts(num_tokens: int) -> list[Passage]:
    """Prompts of that many tokens, cut out of the texts that ship; no two begin at the same place.

    Texts take turns, so that neighbours are different ones. A text that is not longer is one prompt as it is.
    """
    tokenizer = Blueprint.of(TARGET).tokenizer()
    texts = [(each, tokenizer.encode(str(each.prompt), add_special_tokens=False)) for each in mixed_passages()]
    longest = max(len(tokens) for _, tokens in texts)
    return [
        Passage(tokens[start : start + num_tokens], f"{text.place}, token {start}", category=text.category)
        for start in range(0, longest, STRIDE)
        for text, tokens in texts
        if start == 0 or start + num_tokens <= len(tokens)
    ]


async def measure_cell(
    url: str, key: CellKey, mode: str, load: Load, prompts: Sequence[Passage], extra: Mapping[str, Any], warm: bool
) -> ServedCell:
    """Ask one cell's requests; before that, unless the server is `warm`, short ones at as many at once.

    Raises StepFailed where no request is answered.
    """
    plan = load.plan(key.concurrency, mode)
    (at_once,), (speculation,) = plan.loads, plan.modes
    turn = TrafficTurn(at_once, key.repetition, speculation)
    async with TrafficClient(ServerAddress(url)) as client:
        model = await client.served_model()
        if not warm:
            short = replace(plan, num_requests=key.concurrency, max_tokens=min(WARM_UP_TOKENS, plan.max_tokens))
            await Sender(client, model, short, prompts, extra).block(turn)
        block = await Sender(client, model, plan, prompts, extra).block(turn)
    cell = ServedCell(key, block.seconds, block.answers)
    if cell.num_failed == len(cell.answers):
        raise StepFailed(f"no request was answered; the first: {cell.answers[0].error}")
    return cell


class CellFile(RunFile):
    """The file of finished cells."""

    def cells(self) -> dict[CellKey, ServedCell]:
        """All cells of the run."""
        found = (
            ServedCell(CellKey(**each["key"]), each["seconds"], tuple(TimedAnswer(**a) for a in each["answers"]))
            for each in self.records()
        )
        return {cell.key: cell for cell in found}

    def keep(self, cell: ServedCell) -> None:
        """Append one."""
        self.add(key=asdict(cell.key), seconds=cell.seconds, answers=[asdict(answer) for answer in cell.answers])
