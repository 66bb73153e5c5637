"""Measures and stores cells: one contender with one number of requests at once in one repetition.

This file decides which requests a cell sends and when it has failed. `forerun.traffic` sends the requests.
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

STRIDE = 7  # tokens between the beginnings of two prompts from the same text
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that all contenders get; each client sends `per_client` of them, one after another."""

    prompt_tokens: int
    answer_tokens: int
    per_client: int

    def plan(self, concurrency: int, mode: str) -> TrafficPlan:
        """The plan of a load test with `concurrency` clients; all answers have the full length."""
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
    """What identifies a cell in a run."""

    concurrency: int
    repetition: int
    contender: str


@dataclass(frozen=True, slots=True)
class ServedCell:
    """A finished cell: the answers in the order of the requests, and the seconds until the last one ended."""

    key: CellKey
    seconds: float
    answers: tuple[TimedAnswer, ...]

    @property
    def num_failed(self) -> int:
        """The number of requests without a complete answer."""
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
    """Prompts of `num_tokens` tokens, cut out of the bundled texts; no two begin at the same place.

    Texts alternate, so that neighbouring prompts come from different texts. A shorter text is one prompt.
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
    """Send the requests of one cell, after shorter ones of equally many clients unless the server is `warm`.

    `extra` fields are added to request bodies. Raises StepFailed if no request is answered.
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
        cells = (
            ServedCell(CellKey(**each["key"]), each["seconds"], tuple(TimedAnswer(**a) for a in each["answers"]))
            for each in self.records()
        )
        return {cell.key: cell for cell in cells}

    def keep(self, cell: ServedCell) -> None:
        """Append a cell."""
        self.add(key=asdict(cell.key), seconds=cell.seconds, answers=[asdict(answer) for answer in cell.answers])
