"""Reported log-probabilities compared with sorting."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.kernels.sampling import find_sampling_kernels
from forerun.sampling import winners
from forerun.sampling.logprobs import TokenLogprobs, ranked, token_logprobs
from kit.compiled import require_compiler
from sampling.logits import SHAPES, logits_of

rows_of_logits = st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=4)


@pytest.mark.short("8")
@given(rows_of_logits, st.integers(0, 7), st.data())
@pytest.mark.parametrize("few", [0, 8])
def test_ranks_and_alternatives(few: int, values: list[list[int]], top: int, data: st.DataObject) -> None:
    """Small integers give many ties: the lowest id comes first, in ranks and in alternatives."""
    logits = torch.tensor(values, dtype=torch.float32)
    chosen = [data.draw(st.integers(0, 6)) for _ in values]
    law = torch.log_softmax(logits, 1)
    with patch.object(winners, "FEW", few):  # with more alternatives all tokens are sorted
        found = token_logprobs(logits, chosen, top)
    for row, got in enumerate(found):
        order = sorted(range(7), key=lambda token, row=row: (-values[row][token], token))
        assert got.token_id == chosen[row]
        assert got.rank == order.index(chosen[row]) + 1
        assert list(got.top_ids) == order[:top]
        assert list(got.top_logprobs) == [law[row, token].item() for token in order[:top]]
        assert got.logprob == law[row, chosen[row]].item()


def test_low_precision_is_reported_in_float32() -> None:
    logits = torch.randn(2, 50).bfloat16()
    (got, _) = token_logprobs(logits, torch.tensor([3, 4]), 1)
    assert got.logprob == pytest.approx(logits.double().log_softmax(1)[0, 3].item(), abs=1e-5)


def test_of_ranked_numbers_a_request_gets_its_alternatives() -> None:
    """Those of a batch have as many as its most demanding request; impossible tokens are left out."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [-torch.inf, 1.0, -torch.inf, 2.0]])
    chosen = torch.tensor([0, 1])
    for top, expected in ((0, [(), ()]), (1, [(1,), (3,)]), (3, [(1, 2, 0), (3, 1)])):
        found = [TokenLogprobs.of(row, top) for row in ranked(logits, chosen, 4).tolist()]
        assert found == token_logprobs(logits, chosen, top)
        assert [each.top_ids for each in found] == expected


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 5), [], 2) == []


@pytest.mark.short("16-*", "4099-tied", "4099-steep", "1-nothing", "1-flat", "100-NaN", "15-filtered", "15-infinite")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 4099])
def test_kernels_rank_as_torch_does(shape: str, vocab: int) -> None:
    """For logits of every kind; rows with NaN or with few possible tokens are ranked by torch."""
    require_compiler()
    kernels = find_sampling_kernels()
    assert kernels is not None
    for seed, top in itertools.product(range(3), (0, 1, 5, 128)):
        logits, top = logits_of(shape, 4, vocab, seed), min(top, vocab)
        chosen = torch.randint(0, vocab, (4,), generator=torch.Generator().manual_seed(seed))
        assert repr(token_logprobs(logits, chosen, top, kernels)) == repr(token_logprobs(logits, chosen, top))
        law = logits.log_softmax(1)
        unsure = bool(law.isnan().any() or (law.isneginf().sum(1) > vocab - top).any())
        assert (kernels.rank(law, chosen, top) is None) == unsure
