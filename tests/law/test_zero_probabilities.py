"""Zeros, equal laws, point masses and subnormals: nothing illegal is emitted, and nothing is ever NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.config import Verification
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree
from forerun.verify.rules import AcceptLaw, block_law, token_law, walk
from forerun.verify.verify import verify
from law.exact import BELOW_ONE

LAWS = pytest.mark.parametrize("rule", [token_law, block_law])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def chain(
    p: list[list[float]], q: list[list[float]], draft_tokens: list[int], dtype: torch.dtype
) -> tuple[DraftTree, Tensor, Tensor]:
    """One chain with these laws, as (tree, p, row)."""
    depth = len(draft_tokens)
    known = DraftLaw(torch.tensor([[*range(depth), -1]]), torch.tensor(q, dtype=dtype))
    tree = DraftTree.chains(torch.tensor([0]), torch.tensor([draft_tokens]), q=known)
    return tree, torch.tensor(p, dtype=dtype), torch.arange(depth + 1)[None]


def assert_valid_law(law: AcceptLaw) -> None:
    """Acceptance probabilities lie in [0, 1], and every law sums to 1."""
    assert ((law.accept >= 0) & (law.accept <= 1)).all(), law.accept
    assert (law.after >= 0).all(), "a negative or undefined probability"
    assert torch.allclose(law.after.sum(1), torch.ones(len(law.after), dtype=law.after.dtype), atol=1e-5)


@LAWS
@DTYPES
def test_a_draft_token_of_probability_zero_is_rejected_for_every_coin(rule, dtype) -> None:
    args = chain([[0.0, 0.25, 0.75], [0.2, 0.3, 0.5]], [[0.5, 0.25, 0.25]], [0], dtype)
    law = rule(*args)
    assert_valid_law(law)
    assert law.accept[0, 1] == 0
    walked = walk(args[0], law, torch.zeros(1, 2))
    assert walked.length.tolist() == [0]
    assert law.after[0].tolist() == [0.0, 0.0, 1.0]


@LAWS
@DTYPES
def test_equal_laws_accept_every_draft_token(rule, dtype) -> None:
    """The residual is empty; the law that stands in for it is the target's."""
    p = [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.2, 0.3]]
    args = chain(p, p[:2], [2, 0], dtype)
    law = rule(*args)
    assert_valid_law(law)
    walked = walk(args[0], law, torch.full((1, 3), BELOW_ONE, dtype=torch.float64))
    assert walked.length.tolist() == [2]
    assert torch.equal(law.after, args[1])


WEIGHTS = st.sampled_from([0.0, 0.0, 1e-45, 1e-40, 1e-30, 1e-8, 0.3, 1.0])
ROWS = st.lists(WEIGHTS, min_size=5, max_size=5).filter(lambda row: max(row) >= 0.3)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=8, max_size=8), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.booleans())
def test_no_mixture_of_zeros_and_subnormals_gives_nan(
    rows: list[list[float]], draft_tokens: list[int], double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    laws = torch.tensor(rows, dtype=dtype)
    laws = laws / laws.sum(1, keepdim=True)
    tree, _, row = chain([[1.0] * 5] * 4, rows[4:7], draft_tokens, dtype)
    for rule in (token_law, block_law):
        law = rule(tree, laws[:4], row)
        assert_valid_law(law)
        assert not law.after[laws[:4] == 0].any(), "a token that the target never draws"
        for step, token in enumerate(draft_tokens):
            assert laws[step, token] > 0 or law.accept[0, step + 1] == 0 or rule is block_law
    star = DraftTree(
        tokens=torch.tensor([[0, 4, 0, 2]]),
        parents=torch.tensor([[-1, 0, 0, 0]]),
        depth=1,
        width=3,
        q=DraftLaw(torch.tensor([[0, -1, -1, -1]]), laws[7:]),
    )
    law = token_law(star, laws[:4], torch.arange(4)[None])
    assert_valid_law(law)
    assert not law.after[laws[:4] == 0].any()


@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
def test_tokens_that_filters_exclude_are_rejected_and_never_drawn(rule: Verification) -> None:
    """One token is left after the filters: drafted it is accepted, others are rejected, and it is what is drawn."""
    params = SamplingParams(top_k=1)
    rows = [RowSampling(i, params, 5, 0, [1, 2], 2) for i in range(2)]
    draws = Draws(rows, 4, rejection=rule != "coupled")
    law = DraftLaw(torch.tensor([[0, -1]] * 2), torch.tensor([[0.25] * 4]))
    tree = DraftTree.chains(torch.tensor([2, 2]), torch.tensor([[3], [0]]), q=None if rule == "coupled" else law)
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]]).repeat(4, 1)
    verdict = verify(tree, logits, draws, rule)
    assert verdict.length.tolist() == [1, 0]
    assert verdict.next_token.tolist() == [3, 3]
