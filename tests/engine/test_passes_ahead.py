"""Passes of fixed shape that begin before the host knows their tokens: used where they fit, else without effect."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.test_fixed_rounds import PROMPTS, make
from forerun import LLM, SamplingParams
from forerun.device import CPU
from forerun.engine.engine import Engine
from forerun.models.backends.gpu import graphs
from forerun.models.backends.gpu.ahead import PassAhead
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.runner import Read
from forerun.request import Request
from kit.checkpoints import TARGET
from kit.replays import imagine_captures
from law.drafters import spelled

LONG = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends."


def params_of(rng: random.Random, number: int) -> SamplingParams:
    """Parameters of an answer of any length, with end conditions that the device does not know."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]), seed=number, max_tokens=rng.randint(1, 40),
        ignore_eos=rng.random() < 0.5, stop=rng.choice([[], [" a"], ["the", "."]]),
        repetition_penalty=rng.choice([1.0, 1.1]),
    )  # fmt: skip


def taken(monkeypatch: pytest.MonkeyPatch, kind: Any = PassAhead) -> list[bool]:
    """For each object of a kind that was begun ahead, whether its round used it."""
    rows_for, found = kind.rows_for, list[bool]()

    def noted(ahead: Any, *args: object) -> list[int] | None:
        rows = rows_for(ahead, *args)
        found.append(rows is not None)
        return rows

    monkeypatch.setattr(kind, "rows_for", noted)
    return found


def come_and_go(llm: LLM, alone: LLM, rng: random.Random, ask: Callable[[int], Request]) -> None:
    """Assert that requests which begin and are cancelled at random get the answers of their sequences alone."""
    asked: dict[int, Request] = {}
    answers: dict[int, list[int]] = {}
    cancelled = set()
    while len(asked) < 12 or llm.engine.has_work:
        if len(asked) < 12 and rng.random() < 0.14:
            request = ask(len(asked))
            for sequence in llm.requests.sequences(request):
                llm.engine.submit(sequence)
                asked[sequence.id], answers[sequence.id] = request, []
        if llm.engine.sequences and rng.random() < 0.07:
            sequence = rng.choice([*llm.engine.sequences.values()])
            cancelled.add(sequence.id)
            llm.engine.cancel(sequence.request_id)
        for delta in llm.engine.step():
            answers[delta.seq_id] += delta.token_ids
        llm.engine.runner.cache.check()
    assert cancelled
    for seq_id, request in asked.items():
        assert request.prompt is not None
        expected = list(alone.generate(request.prompt, request.sampling_params)[0].outputs[0].token_ids)
        assert answers[seq_id] == expected[: len(answers[seq_id])]
        assert len(answers[seq_id]) == len(expected) or seq_id in cancelled


@pytest.mark.short("None")
@pytest.mark.parametrize("draft", [None, "eagle", "ngram"])
def test_answers_of_requests_that_begin_and_end_at_random_are_those_of_sequences_alone(
    draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sequences that end early, are cancelled, begin, and are drafted in some rounds."""
    monkeypatch.setattr(graphs, "PAUSE", 3)
    imagine_captures(monkeypatch)
    found, rng = taken(monkeypatch), random.Random(5)
    llm, alone = make(TARGET, draft and spelled(draft)), make(TARGET, None, CPU)

    def ask(number: int) -> Request:
        return Request.of(rng.choice([*PROMPTS, LONG]), params_of(rng, number), rng.choice([False, False, 2]))

    come_and_go(llm, alone, rng, ask)
    assert found.count(True) > found.count(False) > 0


def test_a_steady_round_uses_its_pass_begun_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the beginning of a cache block, but not while a prompt waits."""
    found, begun = taken(monkeypatch), list[int]()
    llm = make(TARGET, None)
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda *args: begun.append(1) or run(*args))
    result = llm.generate(PROMPTS[0], SamplingParams(temperature=1, seed=1, max_tokens=70, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == len(begun) == 70, "no pass is in vain where answers end by their length"
    assert all(found)
    assert len(found) == 68, "all but the prompt's and the one behind it"


def test_a_pass_begun_ahead_is_used_by_the_others_when_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(monkeypatch)
    llm = make(TARGET, None)
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=50, ignore_eos=True, stop=["."] if i else []) for i in range(4)
    ]
    lengths = [len(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]
    assert min(lengths) < 50 == max(lengths)
    assert all(found)


OTHERS = {
    "as drawn": [Read(0, [7], judged=[0]), Read(1, [8], judged=[0])],
    "in another order": [Read(1, [8], judged=[0]), Read(0, [7], judged=[0])],
    "one of them": [Read(1, [8], judged=[0])],
    "another token": [Read(0, [7], judged=[0]), Read(1, [9], judged=[0])],
    "more tokens": [Read(0, [7, 3], judged=[0, 1]), Read(1, [8], judged=[0])],
    "another sequence as well": [Read(0, [7], judged=[0]), Read(2, [8], judged=[0])],
}


@pytest.mark.parametrize("asked", OTHERS.values(), ids=list(OTHERS))
def test_a_pass_reads_what_its_round_requests(asked: list[Read], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was begun ahead: here sequences 0 and 1 read tokens 7 and 8."""
    imagine_captures(monkeypatch)
    logits = []
    for ahead in (True, False):
        runner = make(TARGET, None).engine.runner
        runner.read([Read(0, [5, 6, 4], judged=[2]), Read(1, [9, 3], judged=[1])])
        runner.keep([0, 1], [range(3), range(2)])
        runner.read([Read(0, [2], judged=[0]), Read(1, [2], judged=[0])])
        if ahead:
            arriving = runner.read_ahead([0, 1], torch.tensor([[0, 7, 0], [0, 8, 0]]))
            assert arriving is not None
            assert arriving.values == [[0, 7, 0], [0, 8, 0]]
        runner.keep([0, 1], [range(1), range(1)])
        logits.append(runner.read(asked).logits)
        runner.cache.check()
    assert torch.equal(logits[0], logits[1])


@pytest.mark.full
def test_preempted_sequences_are_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that holds two of four texts, with blocks that move."""
    monkeypatch.setattr(graphs, "PAUSE", 1)
    imagine_captures(monkeypatch)
    found = taken(monkeypatch)
    llm, params = make(TARGET, None), SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
    whole = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
    small = GraphRunner.of(llm.engine.runner.decoder, 160, block_size=16)
    engine = Engine(small, options=llm.engine.options)
    for prompt in PROMPTS:
        for sequence in llm.requests.sequences(Request.of(prompt, params)):
            engine.submit(sequence)
    answers: dict[int, list[int]] = {seq_id: [] for seq_id in engine.sequences}
    preempted = 0
    while engine.has_work:
        for delta in engine.step():
            answers[delta.seq_id] += delta.token_ids
        small.cache.check()
        preempted = max(preempted, *(sequence.num_preempted for sequence in engine.sequences.values()), 0)
    assert preempted > 0
    assert found.count(True) > found.count(False)
    assert [tuple(answer) for answer in answers.values()] == whole
