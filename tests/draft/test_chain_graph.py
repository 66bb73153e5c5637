"""Chains drawn by one graph equal those drawn step by step; what a graph cannot do is done step by step."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from draft.rounds import Row, committed
from forerun.device import Placement
from forerun.draft.base import Budget, Draft
from forerun.draft.model.model import ModelDrafter
from forerun.models.backends.gpu.chain_graph import ChainGraph
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.chains import ChainStart, SameIds
from forerun.models.loading import Blueprint
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL

FIXED = Placement(torch.device("cpu"), fixed=True)
VOCAB = 512
TEXTS = ([1, 403, 407, 261, 378], [1, 5, 6], [1, 44, 9, 10, 400, 32, 7])
PARAMS = (SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0.6, seed=2))
PENALISED = (
    SamplingParams(temperature=0, presence_penalty=2.0, logit_bias={100: 80.0, 101: 79.0, 102: 78.5}),
    SamplingParams(seed=1, top_p=0.9, min_p=0.01, repetition_penalty=1.3, min_tokens=3),
    SamplingParams(temperature=0.6, seed=2, top_k=3, presence_penalty=1.5, frequency_penalty=-1.0),
)


@pytest.fixture(scope="module")
def runner() -> GraphRunner:
    loaded = Blueprint.of(str(SMALL), dtype="float32", device=FIXED).load(64)
    assert isinstance(loaded, GraphRunner)
    return loaded


def make(runner: GraphRunner, num_tokens: int = 1024) -> ModelDrafter:
    drafter = ModelDrafter(GraphRunner.of(runner.decoder, num_tokens, 16), VOCAB)
    drafter.observe(committed([Row(seq_id, text) for seq_id, text in enumerate(TEXTS)]))
    return drafter


def draws_of(params: tuple[SamplingParams, ...] = PARAMS, num_ids: int = VOCAB, rejection: bool = False) -> Draws:
    words = [[403, 407], [100, 101, 102]]
    rows = [
        RowSampling(i, p, i + 7, 0, text, 1, (2,), () if params is PARAMS else words)
        for i, (p, text) in enumerate(zip(params, TEXTS, strict=True))
    ]
    return Draws(rows, VOCAB, num_ids=num_ids, rejection=rejection)


def both(runner: GraphRunner, draws: Draws, depths: tuple[int, ...]) -> list[Draft]:
    """The draft by a graph, and the draft step by step."""
    made = make(runner)
    stepped = make(runner)
    stepped.runner.draw_chains = lambda *_, **__: None  # type: ignore[method-assign]
    return [drafter.propose(draws, [Budget(depth) for depth in depths]) for drafter in (made, stepped)]


@pytest.mark.parametrize("params", [PARAMS, PENALISED], ids=["temperature", "penalised"])
@pytest.mark.parametrize("num_ids", [VOCAB, 300])
@pytest.mark.parametrize("depths", [(1, 1, 1), (3, 5, 1), (2, 1, 6)])
def test_a_graph_drafts_what_the_steps_draft(
    runner: GraphRunner,
    monkeypatch: pytest.MonkeyPatch,
    depths: tuple[int, ...],
    num_ids: int,
    params: tuple[SamplingParams, ...],
) -> None:
    taken = []
    body = ChainGraph.body
    monkeypatch.setattr(ChainGraph, "body", lambda *a: taken.append(1) or body(*a))
    one, other = both(runner, draws_of(params, num_ids), depths)
    assert len(taken) == 1
    assert torch.equal(one.tree.tokens, other.tree.tokens)
    assert torch.equal(one.tree.parents, other.tree.parents)
    assert (one.tree.tokens[:, 1:] >= 0).sum(1).tolist() == [*depths]
    assert (one.tree.tokens[:, 1:] < num_ids).all()
    assert one.survival is None, "a chain without a price tells none"
    assert other.survival is None
    assert one.pass_s > 0
    assert other.pass_s > 0
    assert [list(known.places) for known in one.tree.host()] == [list(range(depth + 1)) for depth in depths]


def test_a_graph_serves_fewer_rows_and_shorter_chains_than_its_own(runner: GraphRunner) -> None:
    """A new graph is made only if most of the existing one would be padding; chains equal those of the steps."""
    drafter = make(runner)
    assert isinstance(drafter.runner, GraphRunner)
    sizes: list[set[tuple[int, int]]] = []
    for depths in ((8, 8, 8), (7, 7, 6), (5, 0, 4), (0, 4, 0), (3, 3, 3), (2, 0, 0), (8, 8, 8)):
        drafted = drafter.propose(draws_of(), [Budget(depth) for depth in depths])
        stepped = both(runner, draws_of(), depths)[1]
        assert torch.equal(drafted.tree.tokens, stepped.tree.tokens)
        (graph,) = drafter.runner.chain_graphs.values()
        sizes.append({(shape.rows, shape.depth) for shape in graph.buffers})
    assert sizes == [{(4, 8)}] * 3 + [{(4, 8), (4, 4)}] * 2 + [{(4, 8), (4, 4), (4, 2)}] * 2
    drafter.runner.cache.check()


def test_accepted_draft_tokens_stay_cached_although_the_host_received_them_late(runner: GraphRunner) -> None:
    drafter = make(runner)
    tree = drafter.propose(draws_of(), [Budget(4)] * 3).tree
    chains = tree.tokens[:, 1:].tolist()
    longer = [Row(i, [*text, *chain[:2], 5]) for i, (text, chain) in enumerate(zip(TEXTS, chains, strict=True))]
    drafter.observe(committed(longer, [len(text) - 1 for text in TEXTS]))
    for seq_id, text in enumerate(TEXTS):
        assert drafter.runner.length(seq_id) == len(text) + 2
    drafter.runner.cache.check()


def test_drafts_that_a_graph_cannot_make_are_left_to_the_steps(runner: GraphRunner) -> None:
    drafter = make(runner, num_tokens=32)
    logits, starts, ids = torch.zeros(2, VOCAB), [ChainStart(0, 0, 2), ChainStart(1, 1, 2)], SameIds(VOCAB, VOCAB)
    draw = partial(drafter.runner.draw_chains, logits=logits, ids=ids)
    assert draw(draws_of(rejection=True), starts) is None
    processed = (replace(PARAMS[0], logits_processors=(lambda _text, logits: logits,)), *PARAMS[1:])
    assert draw(draws_of(processed), starts) is None
    assert draw(draws_of(), [ChainStart(0, 0, 90), ChainStart(1, 1, 90)]) is None
    assert draw(draws_of(), [ChainStart(0, 0, 2, 0.5), ChainStart(1, 1, 2)]) is None
    drafter.runner.cache.check()
    assert drafter.runner.cache.num_rows == 0
