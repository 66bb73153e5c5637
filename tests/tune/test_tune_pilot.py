"""The pilot's record, simulated at a depth, is what the engine does at that depth: round by round, text by text."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from forerun import LLM
from forerun.bench.material import Item, Workload
from forerun.bench.plan import Group
from forerun.bench.run import BenchSetup, RunLog, TimedRound
from forerun.control.controller import FixedDepth
from forerun.tune.passes import PilotDrafter, outcome_of
from forerun.tune.predict import DecodingJob, DraftOutcome, RoundShape, TextRounds, simulate
from kit.checkpoints import SMALL, TARGET
from kit.unchecked import unchecked

DEEPEST = 8
NUM_TOKENS = 40
STORIES = [
    "Once upon a time",
    "Lily had a red ball. Lily had a",
    "Tom and his dog ran and ran and ran",
    "One day,",
    "She",
]
EXACT = ["ngram", "ngram:2", "suffix", f"model:{SMALL}", f"model:{TARGET}", "early-exit:1"]


@dataclass(slots=True)
class RowsTape(RunLog):
    """Every round: its shape without what drafters read, and each sequence's draft tokens in order."""

    by_text: dict[int, list[DraftOutcome]] = field(default_factory=dict)
    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)
    num_decoded: int = 0

    @override
    def add(self, timed: TimedRound, clock_s: float) -> None:
        rows = timed.outcome.rows
        for row in rows:
            self.by_text.setdefault(row.seq_id, []).append(DraftOutcome(row.num_drafted, row.accepted))
        if rows and not timed.outcome.num_prompt_tokens:
            sizes = [row.num_drafted for row in rows]
            self.shapes.append((len(rows), len(rows) + sum(sizes), max(sizes), sum(size > 0 for size in sizes)))
            self.num_decoded += sum(row.num_emitted for row in rows)


@pytest.fixture(scope="module", params=EXACT, ids=lambda draft: draft.replace(str(TARGET.parent), ""))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with unchecked():
        llm = LLM(str(TARGET), request.param, dtype="float32", max_model_len=128, max_num_seqs=3, prefix_cache=False)
        llm.engine.controller = FixedDepth()
        yield llm
        llm.close()


def stage_of(llm: LLM, drafter: PilotDrafter | None = None) -> BenchSetup:
    assert llm.tokenizer is not None
    items = tuple(Item(tuple(llm.tokenizer.encode(text)), None, "") for text in STORIES)
    return BenchSetup(llm, {"tales": Workload("tales", items)}, NUM_TOKENS, refills=True, drafter=drafter)


def piloted(llm: LLM, batch: int, temperature: float) -> list[TextRounds]:
    """A pilot of all stories."""
    assert llm.drafter is not None
    pilot, run_log = PilotDrafter(llm.drafter), RunLog(batch, DEEPEST)
    stage = stage_of(llm, pilot)
    sequences = stage.wave(
        Group("tales", batch, temperature), DEEPEST, range(len(STORIES)), run_log, tenant=f"pilot {batch} {temperature}"
    )
    found = []
    for sequence in sequences:
        prompt, answer = sequence.num_prompt, sequence.tokens[sequence.num_prompt :]
        found.append(TextRounds("", prompt, len(answer), pilot.places(sequence.id, prompt, answer, DEEPEST)))
    return found


def ran(llm: LLM, batch: int, temperature: float, depth: int) -> RowsTape:
    """The engine at this depth."""
    run_log = RowsTape(batch, depth)
    group = Group("tales", batch, temperature)
    stage_of(llm).wave(group, depth, range(len(STORIES)), run_log, tenant=f"at {batch} {temperature} {depth}")
    return run_log


@pytest.mark.short("ngram-1.0", "early-exit:1-0.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_record_gives_the_rounds_of_every_depth_of_a_single_text(llm: LLM, temperature: float) -> None:
    texts = piloted(llm, 1, temperature)
    assert all(text.num_tokens == NUM_TOKENS for text in texts)
    for depth in (0, 1, 2, 3, 5, DEEPEST):
        run_log = ran(llm, 1, temperature, depth)
        for text, rounds in zip(texts, run_log.by_text.values(), strict=True):
            assert text.at_depth(depth, place=0) == rounds
        found = simulate(DecodingJob(texts, 1), depth)
        assert sum(found.rounds.values()) == len(run_log.shapes)
        assert found.num_decoded == run_log.num_decoded


@pytest.mark.short("ngram-512", "model:/stories280k-5")
@pytest.mark.parametrize("chunk_tokens", [512, 5])
def test_a_simulated_queue_has_the_rounds_of_the_engine(
    llm: LLM, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if llm.drafter_names == ("suffix",):
        pytest.skip("with several rows at once, suffix has other past answers at each depth")
    options = llm.engine.options.__class__(3, chunk_tokens, prefix_cache=False)
    monkeypatch.setattr(llm.engine, "options", options)
    texts = piloted(llm, 3, 0.0)
    for depth in (0, 1, 2, 4, DEEPEST):
        for batch in (2, 3):
            run_log = ran(llm, batch, 0.0, depth)
            found = simulate(DecodingJob(texts, batch, chunk_tokens), depth)
            expected = sorted(shape[:4] for shape, times in found.rounds.items() for _ in range(times))
            assert expected == sorted(run_log.shapes)
            assert found.num_decoded == run_log.num_decoded


@pytest.mark.full
def test_a_text_recorded_in_a_batch_is_recorded_as_it_is_alone(llm: LLM) -> None:
    if llm.drafter_names == ("suffix",):
        pytest.skip("with several rows at once, suffix has other past answers")
    assert piloted(llm, 3, 0.0) == piloted(llm, 1, 0.0)


def test_drafters_read_a_prompt_once_before_they_first_draft() -> None:
    hits = [[DraftOutcome(2, 0)]] * 6
    texts = [TextRounds("", prompt, 4, hits) for prompt in (7, 9)]
    found = simulate(DecodingJob(texts, 1), 2)
    assert found.rounds == {RoundShape(1, 3, 2, 1, 7): 1, RoundShape(1, 3, 2, 1, 9): 1, RoundShape(1, 3, 2, 1): 4}
    assert sum(shape.num_read for shape in simulate(DecodingJob(texts, 2), 2).rounds) == 16
    assert all(not shape.num_read for shape in simulate(DecodingJob(texts, 2), 0).rounds)


def test_a_tree_is_judged_along_the_path_that_the_text_takes() -> None:
    tree = [7, 1, 2, 3, 4, -1], [-1, 0, 0, 2, 3, -1]
    assert outcome_of(tree, [2, 3, 5], 3) == DraftOutcome(4, 2)
    assert outcome_of(tree, [2, 3, 4], 3) == DraftOutcome(4, 3)
    assert outcome_of(tree, [2, 3, 4], 1) == DraftOutcome(2, 1)
    assert outcome_of(tree, [9], 3) == DraftOutcome(4, 0)
    assert outcome_of(([7], [-1]), [9], 3) == DraftOutcome(0, 0)
    assert outcome_of(([7, 2, 2, 3], [-1, 0, 0, 1]), [2, 3], 2) == DraftOutcome(3, 2)  # the first of equals
