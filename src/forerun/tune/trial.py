"""A trial: one candidate and its target, and every measurement that is made of them.

Each measurement is noted when it is finished, and read from the notes where it is there already; the models are loaded
when the first one is missing. `study.py` decides which are made, and in which order.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.lane import Timed
from forerun.bench.plan import Group, Turn
from forerun.bench.run import BenchRun, Stage, Tape
from forerun.bench.state import as_tuple
from forerun.config import DEFAULT_DEPTH, Speculation
from forerun.draft.build import plan_drafter
from forerun.draft.plan import DraftContext
from forerun.engine.calibration import PROMPT_TOKENS, TEXT_TOKENS
from forerun.engine.kept_costs import from_json
from forerun.engine.measured import MeasuredDepth
from forerun.errors import NotEnoughMemory
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.tune.costs import Outside, measured_costs
from forerun.tune.material import TuneTexts
from forerun.tune.notes import Notes
from forerun.tune.predict import TextRounds
from forerun.tune.settings import PILOT_DEPTH, Candidate, TuneSettings

OUTSIDE_TOKENS = 24  # of each answer in whose rounds that is timed
MARGIN = 32  # tokens of a context beyond what the samples of a calibration take


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter takes beside the target: weights, caches, and at most so much for what it remembers."""

    weights_bytes: int
    cache_bytes: int
    remembered_bytes: int
    target_weights_bytes: int
    target_cache_bytes: int

    @property
    def added_bytes(self) -> int:
        """Weights and caches of the drafter."""
        return self.weights_bytes + self.cache_bytes


@dataclass(slots=True)
class PilotTape(Tape):
    """What became of guesses, by sequence, and what the engine took outside of passes, drafts and verdicts."""

    by_text: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    outside_s: list[float] = field(default_factory=list)  # by round of a whole batch

    def add(self, timed: Timed, clock_s: float) -> None:
        """One more round; rounds that read prompts do not count."""
        for row in timed.outcome.rows:
            self.by_text.setdefault(row.seq_id, Counter())
        if timed.outcome.num_prompt_tokens:
            return
        for row in timed.outcome.rows:
            self.by_text[row.seq_id][row.num_drafted, row.accepted] += 1
        if len(timed.outcome.rows) == self.batch:
            self.outside_s.append(max(0.0, timed.step_s - timed.outcome.round_s))


@dataclass(slots=True)
class Trial:
    """A candidate; `report` hears what is under way."""

    target: Blueprint
    spec: ModelSpec
    candidate: Candidate
    settings: TuneSettings
    texts: TuneTexts
    notes: Notes
    report: ProgressCallback
    name: str = ""
    llm: LLM | None = None
    measuring: Stage | None = None

    def __post_init__(self) -> None:
        plan = plan_drafter(self.candidate.draft, DraftContext(self.target, self.target.tokenizer(), self.report))
        self.name = " ".join(filter(None, (self.candidate.draft, plan.fingerprint())))

    def noted(self, what: str, made: Callable[[], Any]) -> Any:
        """A measurement: as it was noted, or made now and noted."""
        of = f"{self.name} {what}"
        return self.notes.values[of] if of in self.notes.values else self.notes.add(of, made())

    def loaded(self) -> LLM:
        """Both models, with room for every batch. Raises NotEnoughMemory where there is none."""
        if self.llm is None:
            batch, longest = max(self.settings.batches), self.longest()
            least = min(PROMPT_TOKENS + TEXT_TOKENS + MARGIN, self.target.config.max_positions)
            llm = LLM(
                self.spec,
                self.candidate.draft,
                speculation=Speculation(PILOT_DEPTH),
                max_model_len=max(longest, least),
                max_num_seqs=batch,
                prefix_cache=False,  # what a prompt takes to read is measured too
                progress=self.report,
            )
            if llm.plan.num_sequences_speculative < batch:
                room = "; ".join(llm.plan.lines())
                llm.close()
                raise NotEnoughMemory(f"batch {batch} does not fit: lower --batch or --max-tokens ({room})")
            self.llm = llm
        return self.llm

    def close(self) -> None:
        """Free the models, if they were loaded."""
        if self.llm is not None:
            self.llm.close()
            self.llm, self.measuring = None, None

    def longest(self) -> int:
        """Tokens of the longest text, prompt and answer."""
        return max(part.longest(self.settings.num_tokens) for part in (self.texts.pilot, self.texts.rest))

    def stage(self, wish: Callable[[int], Speculation] = Speculation) -> Stage:
        """Where runs are made: engines begin with the costs that were measured."""
        llm = self.loaded()
        llm.engine.controller = self.controller()
        return Stage(
            llm,
            {part.name: part for part in (self.texts.pilot, self.texts.rest)},
            self.settings.num_tokens,
            self.settings.seed,
            wish=wish,
            refills=True,
        )

    def running(self) -> Stage:
        """The stage of all measured runs, whose controllers go on from run to run."""
        if self.measuring is None:
            self.measuring = self.stage()
        return self.measuring

    def memory(self) -> DrafterMemory:
        """What the memory plan says of the drafter."""

        def planned() -> dict[str, int]:
            plan = self.loaded().plan
            alone = self.target.memory.loaded_bytes(plan.max_model_len)
            caches, kept = sum(plan.drafter_cache_bytes.values()), sum(plan.remembered_bytes.values())
            return asdict(DrafterMemory(plan.weights_bytes - alone, caches, kept, alone, plan.cache_bytes))

        return DrafterMemory(**self.noted("memory", planned))

    def arms(self) -> Sequence[str]:
        """The names of what drafts: a single empty one unless it is a mix."""
        return list(self.costs()["names"])

    def costs(self) -> Any:
        """What rounds take, as `engine/kept_costs.py` writes it."""
        return self.noted("costs", lambda: measured_costs(self.loaded(), self.settings.batches, self.report))

    def outside(self) -> Outside:
        """What the engine takes outside of passes and drafts, by batch size, plain and drafted."""

        def timed() -> list[list[float]]:
            found = []
            for batch in sorted(self.settings.batches):
                self.report("measuring costs", 1.0)
                group, times = Group(self.texts.pilot.name, batch, self.settings.temperatures[0]), []
                for depth in (0, DEFAULT_DEPTH):
                    tape = PilotTape(batch, depth)
                    self.stage().wave(
                        group, depth, range(batch), tape, OUTSIDE_TOKENS, tenant=f"outside {group} {depth}"
                    )
                    times.append(statistics.median(tape.outside_s or [0.0]))
                found.append([batch, *times])
            return found

        return Outside(
            tuple((int(batch), plain_s, drafted_s) for batch, plain_s, drafted_s in self.noted("outside", timed))
        )

    def controller(self) -> MeasuredDepth:
        """A controller that knows these costs, for one engine."""
        costs = self.costs()
        return from_json(costs, costs["names"] if len(costs["names"]) > 1 else ())

    def pilot(self, temperature: float, arm: str) -> tuple[TextRounds, ...]:
        """How this arm drafts the first part of the prompts, at the greatest depth, all of them at once."""

        def counted() -> list[list[list[int]]]:
            items = self.texts.pilot.items
            group = Group(self.texts.pilot.name, min(len(items), max(self.settings.batches)), temperature)
            stage = self.stage(lambda depth: Speculation(depth, drafter=arm or None))
            tape = PilotTape(group.batch, PILOT_DEPTH)
            stage.wave(group, PILOT_DEPTH, range(len(items)), tape, tenant=f"pilot {group} {arm}")
            return [[[*pair, times] for pair, times in tape.by_text[i].items()] for i in sorted(tape.by_text)]

        found = self.noted(f"pilot, temperature {temperature:g}, arm {arm}", counted)
        rounds = [{(drafted, accepted): times for drafted, accepted, times in text} for text in found]
        return tuple(TextRounds(*pair) for pair in zip(self.texts.categories, rounds, strict=True))

    def has_run(self, group: Group, turn: Turn) -> bool:
        """Whether this run is noted already."""
        return f"{self.name} {run_name(group, turn)}" in self.notes.values

    def run(self, group: Group, turn: Turn) -> BenchRun:
        """One repetition of plain or of drafted decoding, of all prompts that are measured."""
        found = self.noted(run_name(group, turn), lambda: asdict(self.running().run(group, turn)))
        return BenchRun(**{name: as_tuple(value) for name, value in found.items()})

    def warm_up(self, group: Group, depths: Sequence[int]) -> None:
        """A few rounds at these depths, which are not counted."""
        self.running().warm_up(group, depths)


def run_name(group: Group, turn: Turn) -> str:
    """What a run is called in the notes."""
    return f"run, {group.name}, depth {turn.depth}, repetition {turn.repetition}"
