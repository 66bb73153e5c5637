"""A verdict by one graph is that of `verify`, to the bit; rounds that the graph cannot verify are left to `verify`."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.config import Verification
from forerun.device import CPU, Placement
from forerun.models.backends.gpu import verdicts
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.verdicts import MOST_ROWS, VerdictGraph, VerdictShape
from forerun.models.runner import Judged
from forerun.sampling.constraint import constrained
from forerun.sampling.draws import Draws
from forerun.sampling.logprobs import TokenLogprobs, token_logprobs
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RoundTables, RowSampling, Steps
from forerun.sampling.transforms import masks_of
from forerun.tree import DraftTree, HostTree
from forerun.verify.verify import follow_packed, verify
from kit.checkpoints import SMALL, TARGET
from kit.rows import RandomMasks, odd
from models.random_rounds import VOCAB, round_of


def make() -> VerdictGraph:
    return VerdictGraph(Graphs(CPU.device), CPU.device, VOCAB)


def judged(graph: VerdictGraph, draws: Draws, tree: DraftTree, logits: torch.Tensor) -> torch.Tensor | None:
    found = graph.judge(draws, tree, logits, follow_packed)
    return None if found is None else found.packed


@pytest.mark.short("0-1-*", "1-3-*")
@pytest.mark.parametrize("filtered", [False, True], ids=["temperature", "filtered"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_graphs_verdict_is_that_of_the_rules(seed: int, width: int, filtered: bool) -> None:
    """One graph object over many rounds, so that tables hold values of earlier rounds."""
    dice, graph, accepted = random.Random(seed), make(), 0
    for _ in range(80):
        batch, num_ids = dice.randint(1, 6), dice.choice([VOCAB, 33])
        draws, tree, logits = round_of(dice, width, batch, num_ids, filtered=filtered)
        rule: Verification = dice.choice(["coupled", "token", "block"])  # without laws they are one
        draws = Draws(draws.rows, VOCAB, num_ids=num_ids, rejection=rule != "coupled")
        found, expected = judged(graph, draws, tree, logits), verify(tree, logits, draws, rule).packed
        assert found is not None
        assert torch.equal(found, expected)
        accepted += int(expected[:, 0].sum())
    assert accepted > 50
    assert len(graph.tables) < 20 * (3 if filtered else 1), "a round is padded to a shape that is there"


@pytest.mark.parametrize("most", [0, 3, 20], ids=["alone", "few", "many"])
def test_a_graphs_verdict_has_log_probabilities(most: int) -> None:
    """Of as many alternatives as each request wants, under its own grammar."""
    dice, graph, compared = random.Random(most), make(), 0
    for _ in range(40):
        draws, tree, logits = round_of(dice, 2, dice.randint(1, 4), num_ids := dice.choice([VOCAB, 33]), filtered=True)
        tops = [dice.randint(0, most) for _ in draws.rows]
        rows = [replace(r, params=replace(r.params, logprobs=k)) for r, k in zip(draws.rows, tops, strict=True)]
        found = graph.judge(Draws(rows, VOCAB, num_ids=num_ids), tree, logits, follow_packed)
        assert found is not None
        assert found.ranked is not None
        at = draws.nodes(tree)
        masks, drawn = masks_of(rows, tree.seen_paths() or (), VOCAB), draws.draw(logits, at)
        allowed = constrained(logits[:, :num_ids], masks)
        for node, (row, token) in enumerate(zip(at.row.tolist(), drawn.tolist(), strict=True)):
            if token >= 0:
                (expected,) = token_logprobs(allowed[node : node + 1], [token], tops[row])
                assert repr(TokenLogprobs.of(found.ranked[node].tolist(), tops[row])) == repr(expected)
                compared += 1
    assert compared > 200


@pytest.mark.parametrize("filtered", [False, True], ids=["temperature", "filtered"])
def test_draft_tokens_unknown_to_the_host_are_verified_like_known_ones(filtered: bool) -> None:
    dice, graph = random.Random(0), make()
    for _ in range(40):
        draws, tree, logits = round_of(dice, 1, dice.randint(1, 4), filtered=filtered)
        if draws.constrained:
            continue  # with a grammar the draft tokens are fetched
        hosts = [HostTree.unseen(len(host.tokens) - 1) for host in tree.host()]
        tokens = tree.tokens.clone()
        for row in tokens:  # a device may have drawn nothing at some place
            if len(row) > 1 and dice.random() < 0.3:
                row[dice.randrange(1, len(row)) :] = -1
        unseen = replace(tree, tokens=tokens, parents=torch.where(tokens >= 0, tree.parents, -1), known=hosts)
        found = judged(graph, draws, unseen, logits)
        assert found is not None
        assert torch.equal(found, verify(unseen, logits, draws, "coupled").packed)


def test_rounds_that_the_graph_cannot_verify_are_left_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, tree, logits = round_of(random.Random(1), 1, 2)
    unseen = replace(tree, known=[HostTree.unseen(len(host.tokens) - 1) for host in tree.host()])
    others: tuple[dict[str, Any], ...] = {"logits_processors": (odd,)}, {"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}
    monkeypatch.setattr(verdicts, "MOST_IDS", VOCAB - 1)
    for params in others:
        row = replace(draws.rows[1], params=SamplingParams(**params))
        assert judged(make(), Draws([draws.rows[0], row], VOCAB), tree, logits) is None
    grammar = Draws([draws.rows[0], replace(draws.rows[1], constraint=RandomMasks(0, VOCAB))], VOCAB)
    assert judged(make(), grammar, tree, logits) is not None
    assert judged(make(), grammar, unseen, logits) is None
    monkeypatch.setattr(verdicts, "LEAST_PAIRS", 2 * 512)
    monkeypatch.setattr(verdicts, "MOST_PAIRS", 0)
    counted = Draws([replace(row, params=SamplingParams(presence_penalty=1)) for row in draws.rows], VOCAB)
    assert tree.depth > 1
    assert judged(make(), counted, tree, logits) is None
    assert judged(make(), draws, tree, logits.double()) is None
    assert judged(make(), draws, tree, torch.zeros(MOST_ROWS + 1, VOCAB)) is None


def test_smaller_rounds_use_the_existing_shape() -> None:
    graph = make()
    shape = graph.shape_of(VerdictShape(5, 1, 5, 4))
    assert shape is not None
    graph.tables_of(shape)
    for depth in range(1, 5):
        assert graph.shape_of(VerdictShape(1 + depth, 1, 1 + depth, depth)) in graph.tables
    assert graph.shape_of(VerdictShape(1, 1, 1, 0)) not in graph.tables, "a plain round is not padded so far"


def test_few_graphs_serve_all_parameters_without_unneeded_costly_transforms() -> None:
    def steps_of(**params: Any) -> Steps:
        return RoundTables([RowSampling(0, SamplingParams(**params), 0, 0, [1, 2, 3], 1, (0,))], VOCAB).steps

    graph = make()
    several: list[dict[str, Any]] = [
        {"presence_penalty": 1, "top_p": 0.5},
        {"presence_penalty": 1},
        {"top_p": 0.5},
        {"top_k": 3},
        {},
    ]
    for params in several:
        shape = graph.shape_of(VerdictShape(1, 1, 1, 0, steps_of(**params)))
        assert shape is not None
        assert shape not in graph.tables, params
        assert not shape.steps.top_p or "top_p" in params
        graph.tables_of(shape)
    edits: list[dict[str, Any]] = [{"logit_bias": {3: 1}}, {"min_tokens": 9}, {"repetition_penalty": 2}]
    filters: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 2}, {"min_p": 0.5}, {"top_p": 0.9}]
    assert graph.shape_of(VerdictShape(1, 1, 1, 0, steps_of(), 1)) not in graph.tables, "log-probabilities"
    for params in [*filters, *edits]:
        assert graph.shape_of(VerdictShape(1, 1, 1, 0, steps_of(**params))) in graph.tables, params


def test_an_engines_rounds_are_judged_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    judgements: list[Judged | None] = []
    judge = VerdictGraph.judge

    def noted(*words: Any) -> Judged | None:
        judgements.append(judge(*words))
        return judgements[-1]

    monkeypatch.setattr(VerdictGraph, "judge", noted)
    fixed = Placement(torch.device("cpu"), fixed=True)
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", device=fixed, max_model_len=128, speculation=3)
    llm.generate(["Once upon", "The dog"], SamplingParams(temperature=1, seed=2, max_tokens=12))
    assert len(judgements) > 3
    assert all(judgement is not None for judgement in judgements)
