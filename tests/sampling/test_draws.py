"""Draws: the law of drawn tokens, bits that do not depend on the batch, hostile drafters, unusual batches."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.params import SamplingParams
from kit.laws import chi_square
from sampling.test_transforms import VOCAB, chains, random_logits, sequences


def many_positions(draws: Draws, count: int) -> PathState:
    """Nodes of sequence 0 that differ only in position, which give `count` independent draws from one law."""
    row = torch.zeros(count, dtype=torch.int64)
    return PathState(row, row.new_empty(count, 0), torch.arange(count) + 10)


def single(rejection: bool = False, vocab: int = 50, seed: int = 12, **params: Any) -> Draws:
    row = RowSampling(0, SamplingParams(**params), seed, 0, [1, 3, 3], 1, (2,))
    return Draws([row], vocab, rejection=rejection)


SETTINGS = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 7, "presence_penalty": 1.0},
    {"min_p": 0.05, "temperature": 1.5, "banned_tokens": [0, 1]},
]


def test_coins_are_uniform_and_differ_by_token() -> None:
    draws = single(rejection=True)
    at = many_positions(draws, 50_000)
    coins = [draws.coins(at, torch.full_like(at.row, token)) for token in (0, 1)]
    for coin in coins:
        assert coin.min() > 0
        assert coin.max() < 1
        assert chi_square(torch.bincount((coin * 100).long(), minlength=100), torch.full((100,), 500.0)) > 1e-4
    assert torch.corrcoef(torch.stack(coins))[0, 1].abs() < 4.5 / math.sqrt(50_000)


@pytest.mark.parametrize("rejection", [False, True])
def test_children_are_drawn_without_replacement(rejection: bool) -> None:
    """Ordered pairs of V=4: P(i, j) = p_i p_j / (1 - p_i)."""
    draws, count = single(rejection=rejection, vocab=4), 40_000
    logits = torch.tensor([[0.5, 1.5, -0.5, 0.0]])
    children = draws.children(logits.expand(count, 4), many_positions(draws, count), 2)
    p = logits[0].softmax(0)
    pairs = p[:, None] * p[None] / (1 - p[:, None])
    pairs.fill_diagonal_(0)
    seen = torch.bincount(children.tokens[:, 0] * 4 + children.tokens[:, 1], minlength=16)
    assert chi_square(seen, pairs.flatten() * count) > 1e-4
    if rejection:
        assert children.law is not None
        assert children.survival is not None
        assert torch.equal(children.survival, children.law.gather(1, children.tokens))
        assert children.law[0].tolist() == pytest.approx(p.tolist())


@settings(max_examples=100, deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_drafter_with_the_targets_logits_drafts_the_targets_choice(specs: list[dict[str, Any]], seed: int) -> None:
    """In coupled mode, with the target's logits, the first child is the target's choice for any parameters."""
    rows = [RowSampling(**spec) for spec in specs]
    draws = Draws(rows, VOCAB)
    logits = random_logits(len(rows), seed, torch.float32)
    at = draws.roots()
    assert torch.equal(draws.children(logits, at, 3).tokens[:, 0], draws.draw(logits, at))


@pytest.mark.full
@settings(max_examples=50, deadline=None)
@given(st.lists(sequences(), min_size=2, max_size=5), st.integers(0, 2**31), st.booleans(), st.sampled_from([23, 64]))
def test_rows_have_the_bits_they_would_have_alone(
    specs: list[dict[str, Any]], seed: int, rejection: bool, vocab: int
) -> None:
    rows = [RowSampling(**spec) for spec in specs]
    draws = Draws(rows, vocab, rejection=rejection, num_ids=vocab - 1)
    paths = [[(row.tokens[-1] + 1) % VOCAB, row.tokens[0]] for row in rows]
    at = draws.nodes(chains(rows, paths))
    logits = random_logits(len(at.row), seed, torch.float32, vocab)
    law, drawn, kids = draws.probs(logits, at), draws.draw(logits, at), draws.children(logits, at, 2)
    recovered, coins = draws.recover(law.log(), at), draws.coins(at, drawn)
    for i, row in enumerate(rows):
        mine = at.row == i
        alone = Draws([row], vocab, rejection=rejection, num_ids=vocab - 1)
        there = alone.nodes(chains([row], [paths[i]]))
        assert torch.equal(alone.probs(logits[mine], there), law[mine])
        assert torch.equal(alone.draw(logits[mine], there), drawn[mine])
        assert torch.equal(alone.recover(law[mine].log(), there), recovered[mine])
        assert torch.equal(alone.coins(there, drawn[mine]), coins[mine])
        kids_alone = alone.children(logits[mine], there, 2)
        assert torch.equal(kids_alone.tokens, kids.tokens[mine])
        assert kids.survival is not None
        assert kids_alone.survival is not None
        assert torch.equal(kids_alone.survival, kids.survival[mine])
        assert (kids.law is None) == (not rejection)
        if kids.law is not None and kids_alone.law is not None:
            assert torch.equal(kids_alone.law, kids.law[mine])


HOSTILE = [math.nan, math.inf, -math.inf, 3e38, -3e38]


@pytest.mark.short("params0-*", "params2-one-*", "params1-half-*")
@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("where", ["all", "one", "half"])
@pytest.mark.parametrize("params", [*SETTINGS, {"temperature": 0.0}, {"logits_processors": [lambda _, x: x]}])
def test_children_from_extreme_logits_are_valid_ids_or_none(
    rejection: bool, value: float, where: str, params: dict[str, Any]
) -> None:
    draws = single(rejection=rejection, vocab=9, **params)
    logits = torch.zeros(1, 9)
    logits[0, {"all": slice(None), "one": slice(4, 5), "half": slice(0, 9, 2)}[where]] = value
    children = draws.children(logits, draws.roots(), 3)
    tokens = children.tokens[0].tolist()
    assert all(-1 <= token < 9 for token in tokens)
    real = [token for token in tokens if token >= 0]
    assert len(set(real)) == len(real)
    assert children.survival.isfinite().all()
    if children.law is not None and not draws.greedy[0]:
        assert all(children.law[0, token] > 0 for token in real), (
            "a drafted token has probability 0 in its declared law"
        )


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("params", [{"top_k": 2}, {"temperature": 0.0, "banned_tokens": [1, 2]}])
def test_drawn_tokens_are_not_offered_again_if_no_other_is_left(rejection: bool, params: dict[str, Any]) -> None:
    """An empty search returns token 0, so token 0 must be among those drawn before."""
    draws = single(rejection=rejection, vocab=4, **params)
    children = draws.children(torch.tensor([[9.0, 0.0, 0.0, 5.0]]), draws.roots(), 4)
    assert sorted(children.tokens[0].tolist()) == [-1, -1, 0, 3]
    assert (children.survival > 0).sum() == 2


def test_greedy_children_are_sorted_by_logit_with_ties_by_id() -> None:
    draws = single(vocab=5, temperature=0.0)
    children = draws.children(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), draws.roots(), 5)
    assert children.tokens.tolist() == [[1, 2, 4, 0, 3]]
    assert children.survival.sum().item() == pytest.approx(1.0)


def test_bfloat16_logits_are_compared_in_float32() -> None:
    draws = single()
    logits = random_logits(1, 0, torch.float32, 50).bfloat16()
    assert draws.probs(logits, draws.roots()).dtype == torch.float32
    assert torch.equal(draws.probs(logits, draws.roots()), draws.probs(logits.float(), draws.roots()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_without_a_law_gives_minus_one(temperature: float) -> None:
    draws = Draws([RowSampling(0, SamplingParams(temperature=temperature), 0, 0, [1], 1)], 3, rejection=True)
    for logits in ([-math.inf] * 3, [0.0, math.nan, 1.0]):
        assert draws.draw(torch.tensor([logits]), draws.roots()).tolist() == [-1]
        assert draws.recover(torch.tensor([logits]), draws.roots()).tolist() == [-1]
        assert draws.probs(torch.tensor([logits]), draws.roots()).isnan().any()


def test_a_round_without_rows_draws_nothing() -> None:
    draws = Draws([], VOCAB)
    at = draws.roots()
    assert draws.draw(torch.empty(0, VOCAB), at).shape == (0,)
    assert draws.probs(torch.empty(0, VOCAB), at).shape == (0, VOCAB)
