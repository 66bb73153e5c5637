"""Chains that a device drafts before the host knows the verdict: the next round uses them if it requests them."""

import random
from collections.abc import Sequence

import pytest

from engine.test_fixed_rounds import PROMPTS, make
from engine.test_passes_ahead import LONG, come_and_go, params_of, taken
from forerun import LLM, SamplingParams
from forerun.accept.outcome import Outcome, Stats
from forerun.device import CPU
from forerun.models.backends.gpu import chain_graph
from forerun.models.backends.gpu.ahead import ChainsAhead
from forerun.models.backends.gpu.chain_graph import ChainGraph
from forerun.models.chains import Chains
from forerun.request import Request
from kit.assertions import tokens_of
from kit.checkpoints import TARGET
from kit.replays import imagine_captures
from law.drafters import spelled

DRAFTS = ("eagle", "eagle-1", "mtp", "mtp-of-3")
STEADY = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)


def drafts_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, params: Sequence[SamplingParams]) -> list[list[list[int]]]:
    """The tokens of all trees drafted for these prompts, round by round."""
    draw, found = ChainGraph.draw, list[list[list[int]]]()

    def noted(graph: ChainGraph, *args: object, **options: object) -> Chains | None:
        chains = draw(graph, *args, **options)  # type: ignore[arg-type]
        if chains is not None and chains.nodes is not None:
            found.append(chains.nodes[0].tolist())
        return chains

    with monkeypatch.context() as patched:
        patched.setattr(ChainGraph, "draw", noted)
        llm.generate(PROMPTS, list(params))
    return found


@pytest.mark.short("mtp-of-3")
@pytest.mark.parametrize("draft", DRAFTS)
def test_chains_drafted_ahead_are_those_that_would_be_drafted_later(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, at any temperature, for one sequence and for several with different accepted lengths."""
    imagine_captures(monkeypatch)
    params = [SamplingParams(temperature=i / 2, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(PROMPTS))]
    llm = make(TARGET, spelled(draft), speculation=4)
    found = taken(monkeypatch, ChainsAhead)
    begun = drafts_of(llm, monkeypatch, params)
    assert found.count(True) > len(begun) // 2
    with monkeypatch.context() as patched:
        patched.setattr(ChainGraph, "launch_next", lambda *_: None)
        later = drafts_of(make(TARGET, spelled(draft), speculation=4), monkeypatch, params)
    assert begun == later


@pytest.mark.short("eagle-1", "mtp")
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_steady_round_uses_chains_drafted_ahead(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those after the prompt; none are drafted twice."""
    found, runs = taken(monkeypatch, ChainsAhead), list[int]()
    llm = make(TARGET, spelled(draft), speculation=3)
    run = ChainGraph.run
    monkeypatch.setattr(ChainGraph, "run", lambda *args: runs.append(1) or run(*args))
    outcomes: list[Outcome] = []
    monkeypatch.setattr(Stats, "record", lambda stats, outcome: outcomes.append(outcome))
    llm.generate(PROMPTS[0], STEADY)
    num_drafted = sum(bool(outcome.rows and outcome.rows[0].num_drafted) for outcome in outcomes)
    assert all(found)
    assert len(found) == num_drafted - 1
    assert num_drafted <= len(runs) <= num_drafted + 1, "the last round does not know that it is the last"


@pytest.mark.short("eagle")
@pytest.mark.parametrize("draft", ["eagle", "mtp-of-3"])
def test_chains_drafted_ahead_are_used_by_the_others_when_an_answer_ends(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagine_captures(monkeypatch)
    found = taken(monkeypatch, ChainsAhead)
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=50, ignore_eos=True, stop=["."] if i else [], top_k=9 * i)
        for i in range(4)
    ]
    results = make(TARGET, spelled(draft), speculation=3).generate(PROMPTS, params)
    assert tokens_of(results) == tokens_of(make(TARGET, None, CPU).generate(PROMPTS, params))
    assert min(len(result.outputs[0].token_ids) for result in results) < 50
    assert all(found)
    assert len(found) > 15


@pytest.mark.short("3-eagle")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("speculation", [3, True])
def test_answers_of_requests_that_begin_and_end_at_random_are_those_of_sequences_alone(
    draft: str, speculation: int | bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sequences that end early, are cancelled, begin, and are preempted."""
    monkeypatch.setattr(chain_graph, "CHAINS_PAUSE", 1)
    imagine_captures(monkeypatch)
    found, rng = taken(monkeypatch, ChainsAhead), random.Random(7)
    llm, alone = make(TARGET, spelled(draft), speculation=speculation), make(TARGET, None, CPU)

    def ask(number: int) -> Request:
        params = params_of(rng, number)
        params.repetition_penalty = rng.choice([1.0, 1.0, 1.0, 1.0, 1.1])
        return Request.of(rng.choice([*PROMPTS, LONG]), params)

    come_and_go(llm, alone, rng, ask)
    assert found.count(True) > 10 or speculation is True
