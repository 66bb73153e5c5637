"""Trained drafters in passes of fixed shape, as on GPUs: the tokens of plain decoding, and the drafts of the CPU."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_fixed_rounds import FIXED, PARAMS
from forerun import LLM, SamplingParams
from forerun.config import Speculation
from forerun.device import Download, Placement
from forerun.draft.base import Budget, Draft
from forerun.draft.model.tap_follower import TapFollower
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.backends.gpu.chain_graph import ChainGraph
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.chains import UnreadTexts
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws
from heads.adapters import adapter_of
from kit.assertions import tokens_of
from kit.card import PLACEMENT, imagined, submit
from kit.checkpoints import TARGET
from kit.replays import imagine_captures
from kit.sparse import write_sparse
from law.drafters import spelled

PROMPTS = [
    "Once upon a time",
    "The little dog",
    "One day, Tim",
    "Lily and her mom went to the park. They saw a big red",
]
SHAPES = [Speculation(4), Speculation(3, 2, 6)]
TRAINED = [
    "medusa", "hydra", "eagle-1", "eagle", "p-eagle", "mtp", "mtp-of-3", "early-exit:adapted", "block", "block:heads",
]  # fmt: skip
DRAFTERS = ["model:stories280k", "early-exit:4", "ngram", *TRAINED]
LIKELY = 0.4


@dataclass
class WithMinSurvival:
    """Calls `propose` with `min_survival` LIKELY, and records the least survival in its drafts."""

    propose: Callable[[Draws, Sequence[Budget]], Draft]
    least: float = 1.0

    def __call__(self, draws: Draws, budgets: Sequence[Budget]) -> Draft:
        draft = self.propose(draws, [replace(budget, min_survival=LIKELY) for budget in budgets])
        if draft.tree.depth:
            assert draft.survival is not None
            self.least = min(self.least, float(draft.survival[draft.tree.valid].min()))
        return draft


@dataclass
class Uneven:
    """Calls `propose` with depths from 0 to 4, and records the draft tokens of each text."""

    propose: Callable[[Draws, Sequence[Budget]], Draft]
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __call__(self, draws: Draws, budgets: Sequence[Budget]) -> Draft:
        depths = [(len(row.tokens) + row.seq_id) % 5 for row in draws.rows]
        cut = [min(budget.depth, depth) for budget, depth in zip(budgets, depths, strict=True)]
        draft = self.propose(draws, [replace(b, depth=depth) for b, depth in zip(budgets, cut, strict=True)])
        for row, depth, tokens in zip(draws.rows, cut, draft.tree.tokens.tolist(), strict=True):
            self.drafts[tuple(row.tokens)] = [token for token in tokens[1:] if token >= 0]
            assert len(self.drafts[tuple(row.tokens)]) <= depth
        return draft


@dataclass
class Alternating:
    """Calls `propose` for trees and chains in turn, and records the draft tokens of each text.

    Asserts that the runner's cache holds no draft tokens afterwards.
    """

    propose: Callable[[Draws, Sequence[Budget]], Draft]
    runner: Runner | None
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    num_rounds: int = 0

    def __call__(self, draws: Draws, budgets: Sequence[Budget]) -> Draft:
        self.num_rounds += 1
        if self.num_rounds % 3 == 0:
            budgets = [replace(budget, width=2) if budget.depth else budget for budget in budgets]
        draft = self.propose(draws, budgets)
        assert self.runner is None or not any(map(self.runner.cache.tail, draws.seq_ids))
        self.drafts |= {
            tuple(row.tokens): tokens[1:] for row, tokens in zip(draws.rows, draft.tree.tokens.tolist(), strict=True)
        }
        return draft


def made(drafter: str | None, device: Placement | str = FIXED, **options: object) -> LLM:
    options |= {"kernels": "torch"} if device == "cpu" else {}
    return LLM(str(TARGET), drafter, dtype="float32", device=device, max_model_len=128, **options)  # type: ignore[arg-type]


@cache
def plain() -> Sequence[Sequence[int]]:
    return tokens_of(made(None).generate(PROMPTS, PARAMS))


@pytest.mark.short("model:stories280k-tree", "eagle-1-chain", "block-tree")
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_tokens_are_those_of_plain_decoding_and_drafts_those_of_the_cpu(kind: str, shape: Speculation) -> None:
    """And as many tokens are drafted and accepted as in passes of any shape."""
    drafter = spelled(kind)
    fixed, usual = (made(drafter, device, speculation=shape, chunk_tokens=7) for device in (FIXED, "cpu"))
    assert isinstance(fixed.engine.runner, GraphRunner)
    for llm in (fixed, usual):
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
        llm.engine.runner.cache.check()
    assert fixed.stats.num_drafted == usual.stats.num_drafted
    assert fixed.stats.num_accepted == usual.stats.num_accepted > 0


@pytest.mark.short("mtp-of-3-chain")
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("kind", TRAINED)
def test_results_of_a_graph_are_not_read_after_another_graph_ran(
    kind: str, shape: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later passes overwrite the states of a pass, so those that are needed longer must be copied."""
    drafter, counts = spelled(kind), []
    for captured in (False, True):
        keys = imagine_captures(monkeypatch) if captured else ()
        llm = made(drafter, speculation=shape, chunk_tokens=7)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
        assert (len(keys) > 2) == captured
        counts.append((llm.stats.num_drafted, llm.stats.num_accepted))
    assert counts[0] == counts[1]


@pytest.mark.short("eagle")
@pytest.mark.parametrize("kind", ["eagle", "mtp-of-3", "medusa"])
def test_chains_end_below_min_survival(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a mix that merges drafts, which asks its members for likely tokens and their survival."""
    drafter, counts = spelled(kind), []
    for device in (FIXED, "cpu"):
        llm = made(drafter, device, speculation=4)
        assert llm.engine.drafter is not None
        priced = WithMinSurvival(llm.engine.drafter.propose)
        monkeypatch.setattr(llm.engine.drafter, "propose", priced)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
        assert priced.least >= LIKELY
        counts.append((llm.stats.num_drafted, llm.stats.num_accepted))
    assert counts[0] == counts[1]


@pytest.mark.short("hydra", "block", "early-exit:adapted")
@pytest.mark.parametrize("kind", TRAINED)
def test_a_graph_drafts_what_is_drafted_step_by_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of rows with different depths, some of them 0."""
    drafter, found, bodies = spelled(kind), [], list[int]()
    body = ChainGraph.body
    monkeypatch.setattr(ChainGraph, "body", lambda *arguments: bodies.append(1) or body(*arguments))
    for at_once in (True, False):
        llm = made(drafter, speculation=4)
        assert llm.engine.drafter is not None
        runner = getattr(llm.engine.drafter, "runner", llm.engine.runner)
        if not at_once:
            monkeypatch.setattr(runner, "draw_chains", lambda *_, **__: None)
        uneven = Uneven(llm.engine.drafter.propose)
        monkeypatch.setattr(llm.engine.drafter, "propose", uneven)
        assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
        found.append(uneven.drafts)
        assert (len(bodies) > 5) == at_once
        bodies.clear()
    assert found[0] == found[1]
    assert sum(map(len, found[0].values())) > 30


def test_a_graph_drafts_after_trees_whose_nodes_stayed_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter keeps the accepted nodes of trees in its cache, so a row may have no unread text before a chain."""
    found, unread, unread_texts = [], list[list[int]](), EarlyExitDrafter.unread_texts

    def noted(drafter: EarlyExitDrafter, reads: Sequence[Read]) -> UnreadTexts:
        unread.append([len(read.tokens) for read in reads])
        return unread_texts(drafter, reads)

    monkeypatch.setattr(EarlyExitDrafter, "unread_texts", noted)
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
    for device in (FIXED, "cpu"):
        llm = made(spelled("early-exit:adapted"), device, speculation=4)
        assert isinstance(llm.engine.drafter, EarlyExitDrafter)
        mixed = Alternating(llm.engine.drafter.propose, llm.engine.runner if device == FIXED else None)
        monkeypatch.setattr(llm.engine.drafter, "propose", mixed)
        llm.generate(PROMPTS[:2], params)
        llm.engine.runner.cache.check()
        found.append(mixed.drafts)
    assert found[0] == found[1]
    assert any(min(counts) > 0 for counts in unread)
    assert any(min(counts) == 0 < max(counts) for counts in unread)
    assert any(max(counts) == 0 for counts in unread)


@pytest.mark.short("eagle-3")
@pytest.mark.parametrize("num_blocks", [1, 3, 5])
@pytest.mark.parametrize("kind", ["eagle", "mtp-of-3", "p-eagle", "block", "early-exit:adapted"])
def test_a_text_without_cache_space_does_not_stop_other_drafts(
    kind: str, num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own answer goes on, too."""
    llm = made(spelled(kind), speculation=4)
    drafter = llm.engine.drafter
    assert isinstance(drafter, TapFollower)
    drafter.runner = GraphRunner.of(drafter.runner.decoder, 16 * num_blocks, block_size=16)
    if isinstance(drafter, EarlyExitDrafter):
        drafter.adapter = drafter.runner
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
    assert llm.engine.drafter is drafter, caplog.text
    drafter.runner.cache.check()


@pytest.mark.short("block:heads")
@pytest.mark.parametrize("kind", ["p-eagle", "block", "block:heads"])
def test_no_more_masked_positions_are_drafted_than_the_budget_has_nodes(kind: str) -> None:
    """With fewer nodes than levels."""
    llm = made(spelled(kind), speculation=4)
    drafter = llm.engine.drafter
    assert isinstance(drafter, TapFollower)
    propose = drafter.propose

    def cut(draws: Draws, budgets: Sequence[Budget]) -> Draft:
        return propose(draws, [replace(budget, nodes=1) if budget.depth else budget for budget in budgets])

    drafter.propose = cut  # type: ignore[method-assign, assignment]
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == plain()
    assert llm.engine.drafter is drafter
    assert llm.stats.num_accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "kind", ["model:stories280k", "medusa", "eagle", "mtp-of-3", "early-exit:adapted", "block:heads"]
)
def test_rejection_rules_give_the_texts_of_the_cpu(kind: str, rule: str) -> None:
    """Chains drawn on the device give the same texts as chains grown level by level, since the draws are the same."""
    drafter, texts = spelled(kind), []
    for device in (FIXED, "cpu"):
        llm = made(drafter, device, speculation=3, verification=rule)
        texts.append(tokens_of(llm.generate(PROMPTS, PARAMS)))
        assert 0 < llm.stats.num_accepted < llm.stats.num_drafted
    assert texts[0] == texts[1]


def test_adapters_of_layers_with_experts_draft(tmp_path: Path) -> None:
    folder = adapter_of(write_sparse(tmp_path / "experts", "mixtral"), tmp_path / "adapter", 2, range(1))
    for device in (FIXED, "cpu"):
        assert tokens_of(made(f"early-exit:2:{folder}", device).generate(PROMPTS, PARAMS)) == plain()


@pytest.mark.short("block:heads-chain")
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("kind", TRAINED)
def test_on_a_gpu_no_operation_mixes_devices_and_the_host_waits_once_a_round(
    kind: str, shape: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = spelled(kind)
    unseen, begin, begun = shape.width == 1, ChainGraph.launch_next, list[bool]()
    monkeypatch.setattr(ChainGraph, "launch_next", lambda *args: begun.append(bool(verdict := begin(*args))) or verdict)
    with imagined(monkeypatch) as seen, torch.inference_mode():
        llm = made(drafter, PLACEMENT, speculation=shape)
        submit(llm, PROMPTS, PARAMS[1])
        while llm.engine.has_work:
            seen.clear()
            begun.clear()
            llm.engine.step()
            assert set(seen.waits) == (set() if any(begun) else {"tolist"}), "a verdict before chains needs no wait"
            assert len(seen.waits) <= 1 or not unseen
    assert llm.stats.num_accepted > 0


MOST_SENT = {  # operations of a round; graphs are one each, and chains that begin ahead are cut as answers end
    "eagle-1": 21, "eagle": 21, "p-eagle": 18, "mtp": 21, "mtp-of-3": 31,
    "medusa": 17, "hydra": 17, "block": 17, "block:heads": 17, "early-exit:adapted": 17,
}  # fmt: skip
NUM_GRAPHS = 3  # the whole chain with the text before it, the target's pass, the verdict


@pytest.mark.short("block:heads")
@pytest.mark.parametrize("kind", MOST_SENT)
def test_a_round_sends_few_operations_to_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep the chains are: the operations between the passes of a chain are captured with them.

    Of the operations that begin the next chains only the graph counts: the host would wait for the verdict meanwhile.
    """
    drafter, sent, begin = spelled(kind), list[list[str]](), ChainGraph.launch_next
    with imagined(monkeypatch) as seen, torch.inference_mode():

        def uncounted(*args: Any) -> Download | None:
            first, verdict = len(seen.sent), begin(*args)
            seen.sent[first:] = [each for each in seen.sent[first:] if each == "graph"]
            return verdict

        monkeypatch.setattr(ChainGraph, "launch_next", uncounted)
        llm = made(drafter, PLACEMENT, speculation=5)
        submit(llm, PROMPTS[:2], PARAMS[0])
        submit(llm, PROMPTS[2:], PARAMS[1])
        while llm.engine.has_work and len(sent) < 10:
            seen.clear()
            llm.engine.step()
            sent.append([*seen.sent])
    assert statistics.median(map(len, sent)) <= MOST_SENT[kind], sent[len(sent) // 2]
    most = 47 if kind == "mtp-of-3" else 41
    assert max(map(len, sent)) <= most, "after prompts; a long prompt takes a pass before"
    assert statistics.median(each.count("graph") for each in sent) == NUM_GRAPHS
