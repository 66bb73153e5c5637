"""A trial: one candidate and its target, and every measurement that is made of them.

Each measurement is noted when it is finished, and read from the notes where it is there already; the models are loaded
when the first one is missing. `study.py` decides which are made, and in which order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.plan import CHOSEN, Group, Turn, depth_name
from forerun.bench.run import BenchRun, Stage, waves
from forerun.bench.state import as_tuple
from forerun.config import Speculation
from forerun.control.controller import Controller, FixedDepth
from forerun.control.kept_costs import from_json
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.engine.calibration import PROMPT_TOKENS, TEXT_TOKENS
from forerun.errors import NotEnoughMemory
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.tune.costs import measured_costs
from forerun.tune.material import TuneTexts
from forerun.tune.notes import Notes
from forerun.tune.passes import PassMeter
from forerun.tune.pilot import PilotDrafter, PilotTape, as_numbers, text_rounds
from forerun.tune.predict import TextRounds
from forerun.tune.settings import PILOT_DEPTH, Candidate, TuneSettings

MARGIN = 32  # tokens of a context beyond what texts take, so that deep drafts fit at their ends


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter takes beside the target: weights, caches, and at most so much for what it remembers."""

    weights_bytes: int
    cache_bytes: int
    remembered_bytes: int
    target_weights_bytes: int
    target_cache_bytes: int


def wish_of(depth: int) -> Speculation:
    """What a run at this depth asks for; CHOSEN leaves the depth to the controller."""
    return Speculation() if depth == CHOSEN else Speculation(depth)


@dataclass(slots=True)
class TimeLimit:
    """Until when measurements may begin; `deadline_s` is None where there is no limit."""

    deadline_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether no measurement may begin any more."""
        return self.deadline_s is not None and time.perf_counter() >= self.deadline_s

    def share(self, num_left: int) -> TimeLimit:
        """An equal share of the time that is left, for one of so many."""
        now_s = time.perf_counter()
        return self if self.deadline_s is None else TimeLimit(now_s + max(0.0, self.deadline_s - now_s) / num_left)


class OutOfTime(Exception):
    """What a prediction needs would have to be measured behind the time limit."""


@dataclass(slots=True)
class Trial:
    """A candidate; `report` hears what is under way, and `clock` says until when something may begin."""

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
    clock: TimeLimit = field(default_factory=TimeLimit)

    def __post_init__(self) -> None:
        plan = plan_drafter(self.candidate.draft, DraftContext(self.target, self.target.tokenizer(), self.report))
        self.name = " ".join(filter(None, (self.candidate.draft, plan.fingerprint())))

    def noted(self, what: str, made: Callable[[], Any]) -> Any:
        """A measurement: as it was noted, or made now and noted. Raises OutOfTime where it is too late for that."""
        of = f"{self.name} {what}"
        if of in self.notes.values:
            return self.notes.values[of]
        if self.clock.over:
            raise OutOfTime
        return self.notes.add(of, made())

    def loaded(self) -> LLM:
        """Both models, with room for every batch. Raises NotEnoughMemory where there is none."""
        if self.llm is None:
            batch, longest = max(self.settings.batches), self.longest()
            least = PROMPT_TOKENS + TEXT_TOKENS + MARGIN
            llm = LLM(
                self.spec,
                self.candidate.draft,
                speculation=Speculation(PILOT_DEPTH),
                max_model_len=min(max(longest + MARGIN, least), self.target.config.max_positions),
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
        return self.texts.workload.longest(self.settings.num_tokens)

    def stage(
        self,
        wish: Callable[[int], Speculation] = wish_of,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
    ) -> Stage:
        """Where runs are made: engines begin with the costs that were measured, unless there is another controller."""
        texts = self.texts.workload
        return Stage(
            self.loaded(),
            {texts.name: texts},
            self.settings.num_tokens,
            self.settings.seed,
            wish=wish,
            refills=True,
            drafter=drafter,
            controller=controller or self.controller(),
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
        names = list(self.costs()["names"])
        if not names:  # the machine was too slow to measure any
            drafter = self.loaded().drafter
            names = list(drafter.names if drafter is not None else ())
        return names or [""]

    def costs(self) -> Any:
        """What rounds take, as `control/kept_costs.py` writes it."""
        return self.noted("costs", lambda: measured_costs(self.loaded(), self.settings.batches, self.report))

    def controller(self) -> MeasuredDepth:
        """A controller that knows these costs, for one engine."""
        costs = self.costs()
        if not costs["passes"]:
            return MeasuredDepth()
        return from_json(costs, costs["names"] if len(costs["names"]) > 1 else ())

    def remembers(self) -> bool:
        """Whether what is drafted may depend on earlier answers, and so on the batch size."""
        return self.memory().remembered_bytes > 0

    def num_texts(self, batch: int) -> int:
        """Texts of a run, whose last wave is as full as the others."""
        return list(waves(len(self.texts.workload.items), batch))[-1].stop

    def pilot(self, group: Group, arm: str) -> tuple[TextRounds, ...]:
        """What this arm guesses at every place of every text of a run, at the greatest depth of interest.

        One record serves all batch sizes where nothing is remembered: what is drafted then depends on the text alone.
        """
        batches = self.settings.batches
        batch = group.batch if self.remembers() else max(batches)
        num_texts = self.num_texts(batch) if self.remembers() else max(map(self.num_texts, batches))
        items = self.texts.workload.items

        def recorded() -> list[Any]:
            self.report(f"recording guesses, batch {batch}", 0.0)
            llm = self.loaded()
            assert llm.drafter is not None, "a candidate drafts"
            pilot, tape = PilotDrafter(llm.drafter), PilotTape(batch, PILOT_DEPTH)
            stage = self.stage(lambda depth: Speculation(depth, drafter=arm or None), pilot, FixedDepth())
            own = replace(group, batch=batch)
            answers = stage.wave(own, PILOT_DEPTH, range(num_texts), tape, tenant=f"pilot {own} {arm}")
            found = []
            for number, (seq_id, answer) in enumerate(zip(sorted(tape.seq_ids), answers, strict=True)):
                prompt = len(items[number % len(items)].prompt)
                places = pilot.places(seq_id, prompt, answer, PILOT_DEPTH)
                found.append(as_numbers(TextRounds("", prompt, len(answer), places)))
            return found

        found = self.noted(f"pilot, batch {batch}, temperature {group.temperature:g}, arm {arm}", recorded)
        kinds = self.texts.categories
        texts = [text_rounds(kinds[number % len(kinds)], own) for number, own in enumerate(found)]
        return tuple(texts[: self.num_texts(group.batch)])

    def passes(self, group: Group, arm: str, part: str, sizes: Mapping[int, Sequence[int]], repeats: int) -> Any:
        """What rounds of these sizes take, by the number of rows, as it was noted under the name of this `part`."""

        def timed() -> list[list[Any]]:
            stage, deepest = self.stage(controller=FixedDepth()), PILOT_DEPTH
            found: list[list[Any]] = []
            for num_rows, own in sizes.items():
                meter = PassMeter(stage, replace(group, batch=num_rows), arm or None, deepest, repeats)
                found.append([num_rows, meter.measure(own, self.report).as_object()])
            return found

        return self.noted(f"passes, {group.name}, arm {arm}, {part}", timed)

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
    return f"run, {group.name}, depth {depth_name(turn.depth)}, repetition {turn.repetition}"
