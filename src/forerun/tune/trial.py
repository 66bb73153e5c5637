"""A trial: one candidate with its target, and all measurements of it.

Finished measurements are stored and not repeated; models are loaded only if a measurement is missing. `study.py`
chooses the measurements and their order. `early-exit:auto` is expanded to candidates here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from forerun.annotations import ProgressCallback
from forerun.bench.material import Workload
from forerun.bench.measure import Measurements, draft_fingerprint, load_for
from forerun.bench.plan import CHOSEN, Group, Selection, Turn
from forerun.bench.run import BenchRun, BenchSetup, RunLog, run_name, waves
from forerun.config import AUTO, AUTO_DEPTH, Speculation
from forerun.control.controller import Controller, FixedDepth
from forerun.draft.base import Drafter
from forerun.draft.spec import DraftSpec, parse_spec, with_class_names
from forerun.engine.calibration import PROMPT_TOKENS, TEXT_TOKENS
from forerun.errors import UnknownDrafter
from forerun.limits import shown
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.shape import MOST_NODES
from forerun.stored import of_json
from forerun.tune.passes import PassMeter, PilotDrafter, RowCosts
from forerun.tune.predict import DraftOutcome, TextRounds

MARGIN = 32  # context tokens beyond the texts, for deep drafts at their ends
EXITS = (8, 4, 2)  # `early-exit:auto` tries to exit after 1/8, 1/4 and 1/2 of the layers
T = TypeVar("T")
RecordedText = tuple[int, int, list[list[DraftOutcome]]]  # the fields of TextRounds after `category`
PILOT_DEPTH = AUTO_DEPTH  # draft depth of the pilot run, and the maximum depth predicted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to measure, by its spec; `family` is the spec that the user wrote."""

    draft: str
    family: str

    @property
    def label(self) -> str:
        """Its name in tables and charts."""
        return str(with_class_names(parse_spec(self.draft)))


def candidates_of(drafts: Sequence[str], num_layers: int) -> list[Candidate]:
    """The candidates, without duplicates. Raises UnknownDrafter for an invalid spec, or an empty list."""
    if not drafts:
        raise UnknownDrafter("drafts: there is no drafter to measure: name some, as in --drafts ngram suffix model:DIR")
    candidates: dict[str, Candidate] = {}
    for text in drafts:
        spec = parse_spec(text)
        family = str(spec)
        for draft in exits_of(num_layers) if spec == DraftSpec("early-exit", AUTO) else (family,):
            candidates.setdefault(draft, Candidate(draft, family))
    return list(candidates.values())


def exits_of(num_layers: int) -> list[str]:
    """The specs that `early-exit:auto` stands for. Raises UnknownDrafter for a single layer."""
    if num_layers < 2:
        raise UnknownDrafter("early-exit:auto: the target has a single layer, so there is no earlier exit")
    return [f"early-exit:{layer}" for layer in sorted({max(1, num_layers // part) for part in EXITS})]


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """Memory of a drafter (weights, caches, and at most `remembered_bytes` of past answers) and of the target."""

    weights_bytes: int
    cache_bytes: int
    remembered_bytes: int
    target_weights_bytes: int
    target_cache_bytes: int


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Stored costs of rounds: pairs of the number of rows and the JSON form of a RowCosts."""

    rows: list[tuple[int, Any]]
    num_busy: float | None


def recorded_texts(value: Any) -> list[RecordedText]:
    """The texts of a pilot run, from JSON. Raises ValueError for anything else, and for impossible numbers."""
    texts: list[RecordedText] = of_json(list[RecordedText], value)
    for _, num_tokens, places in texts:
        if len(places) != num_tokens or any(not each[1] <= each[0] <= MOST_NODES for place in places for each in place):
            raise ValueError("it is not of a text's drafts")
    return texts


class OutOfTime(Exception):
    """A required measurement would start after the time limit."""


@dataclass(slots=True)
class Trial:
    """The measurements of one candidate; `report` gets progress, and no measurement starts after `deadline_s`."""

    target: Blueprint
    spec: ModelSpec
    candidate: Candidate
    selection: Selection
    workload: Workload
    kept: Measurements
    report: ProgressCallback
    name: str = ""
    llm: LLM | None = None
    measuring: BenchSetup | None = None
    deadline_s: float = math.inf  # of time.perf_counter

    def __post_init__(self) -> None:
        fingerprint = draft_fingerprint(self.target, self.candidate.draft, self.report)
        self.name = " ".join(filter(None, (self.candidate.draft, fingerprint)))

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() >= self.deadline_s

    def stored(self, name: str, parse: Callable[[Any], T], measure: Callable[[], Any]) -> T:
        """The stored measurement of this name, or else a new one. Raises OutOfTime after the deadline.

        `parse` reads its JSON form; a stored one that it refuses with a ValueError raises InvalidRequest.
        """
        name = f"{self.name} {name}"
        if not self.kept.holds(name):
            if self.late:
                raise OutOfTime
            self.kept.add(name, measure())
        return self.kept.value(name, parse)

    def loaded(self) -> LLM:
        """The LLM with both models, for the largest batch. Raises NotEnoughMemory if it does not fit."""
        if self.llm is None:
            longest = self.workload.longest(self.selection.num_tokens)
            length = max(longest + MARGIN, PROMPT_TOKENS + TEXT_TOKENS + MARGIN)
            self.llm = load_for(
                max(self.selection.batches),
                self.spec,
                self.candidate.draft,
                "--batch or --max-tokens",
                max_model_len=min(length, self.target.config.max_positions),
                progress=self.report,
            )
        return self.llm

    def close(self) -> None:
        """Free the models, if they were loaded."""
        if self.llm is not None:
            self.llm.close()
            self.llm, self.measuring = None, None

    def setup(self, controller: Controller | None = None, drafter: Drafter | None = None, name: str = "") -> BenchSetup:
        """A setup whose engines start with a copy of this controller, or of the LLM's own."""
        texts = self.workload
        return BenchSetup(
            self.loaded(),
            {texts.name: texts},
            self.selection.num_tokens,
            self.selection.seed,
            speculation=lambda depth: Speculation() if depth == CHOSEN else Speculation(depth, drafter=name or None),
            refills=True,
            drafter=drafter,
            controller=controller,
        )

    def running(self) -> BenchSetup:
        """The setup of all measured runs; its controllers start as the LLM's own and persist between runs."""
        if self.measuring is None:
            self.measuring = self.setup()
        return self.measuring

    def memory(self) -> DrafterMemory:
        """The drafter's memory according to the memory plan."""

        def planned() -> dict[str, int]:
            plan = self.loaded().plan
            alone = self.target.memory.loaded_bytes(plan.max_model_len)
            caches, kept = sum(plan.drafter_cache_bytes.values()), sum(plan.remembered_bytes.values())
            return asdict(DrafterMemory(plan.weights_bytes - alone, caches, kept, alone, plan.cache_bytes))

        memory: DrafterMemory = self.stored("memory", partial(of_json, DrafterMemory), planned)
        return memory

    def drafter_names(self) -> Sequence[str]:
        """The names of a mix's drafters; [""] for a single drafter."""

        def listed() -> list[str]:
            drafter = self.loaded().drafter
            return list(drafter.names) if drafter is not None and len(drafter.names) > 1 else [""]

        names: list[str] = self.stored("names", partial(of_json, list[str]), listed)
        return names

    def num_texts(self, batch: int) -> int:
        """The number of texts of a run, a multiple of the batch size."""
        return list(waves(len(self.workload.items), batch))[-1].stop

    def pilot(self, group: Group, drafter_name: str) -> tuple[TextRounds, ...]:
        """The draft outcomes of one drafter of a mix at every position of every text of a run, at PILOT_DEPTH.

        One record serves all batch sizes, unless the drafter uses past answers.
        """
        batches, items = self.selection.batches, self.workload.items
        if self.memory().remembered_bytes:
            batches = (group.batch,)
        batch, num_texts = max(batches), max(map(self.num_texts, batches))

        def recorded() -> list[Any]:
            self.report(f"recording drafts, batch {batch}", 0.0)
            drafter = self.loaded().drafter
            assert drafter is not None, "a candidate has a drafter"
            pilot, together = PilotDrafter(drafter), replace(group, batch=batch)
            setup = self.setup(FixedDepth(), pilot, drafter_name)
            run_log, tenant = RunLog(batch, PILOT_DEPTH), f"pilot {together} {drafter_name}"
            rounds = []
            for sequence in setup.wave(together, PILOT_DEPTH, range(num_texts), run_log, tenant=tenant):
                prompt = sequence.num_prompt
                answer = sequence.tokens[prompt:]
                rounds.append([prompt, len(answer), pilot.places(sequence.id, prompt, answer, PILOT_DEPTH)])
            return rounds

        name = f"pilot, batch {batch}, temperature {group.temperature:g}, arm {drafter_name}"
        texts = enumerate(self.stored(name, recorded_texts, recorded))
        rounds = [TextRounds(items[number % len(items)].category, *each) for number, each in texts]
        return tuple(rounds[: self.num_texts(group.batch)])

    def passes(
        self, group: Group, drafter_name: str, part: str, sizes: Mapping[int, Sequence[int]], repeats: int
    ) -> dict[int, RowCosts]:
        """Costs of rounds of these sizes, by the number of rows; stored under the name of this `part`."""

        def timed() -> dict[str, Any]:
            measured: list[list[Any]] = []
            for num_rows, groups in sizes.items():
                rows = replace(group, batch=num_rows)
                meter = PassMeter(self.setup(FixedDepth()), rows, drafter_name or None, PILOT_DEPTH, repeats)
                measured.append([num_rows, asdict(meter.measure(groups, self.report))])
            return {"rows": measured, "num_busy": max(costs["num_busy"] or 0.0 for _, costs in measured)}

        def parsed(value: Any) -> dict[int, RowCosts]:
            costs = {num_rows: RowCosts.from_json(each) for num_rows, each in of_json(PassCosts, value).rows}
            if costs.keys() != sizes.keys():
                raise ValueError(f"it has {shown([*costs])} rows and not {shown([*sizes])}")
            return costs

        return self.stored(f"passes, {group.name}, arm {drafter_name}, {part}", parsed, timed)

    def run(self, group: Group, turn: Turn) -> BenchRun:
        """One repetition of plain or drafted decoding of all prompts."""
        parse = partial(BenchRun.from_json, turn=turn, num_answers=self.num_texts(group.batch))
        return self.stored(run_name(group, turn), parse, lambda: asdict(self.running().run(group, turn)))
