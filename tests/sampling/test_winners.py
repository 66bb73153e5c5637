"""Winners found by looking at few tokens equal the argmax over all noise, to the bit, for any logits."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import FAINTEST, QUIET, Purpose, absorb, gumbel, gumbel_at, hash_bits, loud_ids
from forerun.sampling.params import SamplingParams
from forerun.sampling.winners import LEAST_VOCAB, RoundNoise, first_largest
from sampling.logits import SHAPES, logits_of

CPU = torch.device("cpu")
VOCABS = st.sampled_from([LEAST_VOCAB - 1, LEAST_VOCAB, LEAST_VOCAB + 17, 40_001])
WIDE = LEAST_VOCAB + 3


def keys_of(seed: int, rows: int) -> Tensor:
    return absorb(torch.full((rows,), seed), torch.arange(rows))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SHAPES), VOCABS, st.integers(1, 3), st.integers(0, 2**40), st.booleans())
def test_winners_are_the_first_largest_of_all_scores(
    shape: str, vocab: int, rows: int, seed: int, double: bool
) -> None:
    logits, keys = logits_of(shape, rows, vocab, seed), keys_of(seed, rows)
    logits = logits.double() if double else logits
    found = RoundNoise(vocab, CPU).winners(logits, keys)
    assert torch.equal(found[:, 0], (logits + gumbel(keys, vocab)).argmax(1))


@pytest.mark.parametrize("seed", range(8))
def test_the_winner_may_have_the_largest_quiet_noise_where_the_peak_has_the_faintest(seed: int) -> None:
    keys = keys_of(seed, 1)
    noise = gumbel(keys, WIDE)[0]
    faintest = int(noise.argmin())
    quiet = int(torch.where(noise < QUIET, noise, -torch.inf).argmax())
    logits = torch.full((1, WIDE), -1e4)
    logits[0, faintest] = 0.0
    for above, winner in ((0.1, quiet), (-0.1, faintest)):
        logits[0, quiet] = noise[faintest] - noise[quiet] + above
        assert RoundNoise(WIDE, CPU).winners(logits, keys).tolist() == [[winner]]


def test_equal_scores_go_to_the_lowest_id() -> None:
    """Logits are so large that noise is rounded away: every token of the row has the same score."""
    logits = torch.full((2, WIDE), 1e12)
    assert RoundNoise(WIDE, CPU).winners(logits, keys_of(1, 2)).tolist() == [[0], [0]]


def test_winners_do_not_depend_on_earlier_calls() -> None:
    noise, keys = RoundNoise(WIDE, CPU), keys_of(3, 6)
    logits = logits_of("steep", 6, WIDE, 0)
    expected = (logits + gumbel(keys, WIDE)).argmax(1, keepdim=True)
    for some in ([0], [2, 1], [1, 1, 2], [5, 4, 3, 2, 1, 0]):
        assert torch.equal(noise.rows(keys[some]), gumbel(keys[some], WIDE))
        assert torch.equal(noise.winners(logits[some], keys[some]), expected[some])


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from([1, 33, 40_001, 151_936]))
@settings(max_examples=30, deadline=None)
def test_tokens_outside_of_the_loud_list_have_noise_below_the_bound(key: int, vocab: int) -> None:
    keys = torch.tensor([key])
    bits, noise, loud = hash_bits(keys, vocab)[0], gumbel(keys, vocab)[0], loud_ids(key, vocab)
    assert torch.equal(loud, ((bits >= 0) & (bits < 2**23)).nonzero()[:, 0])
    others = torch.ones(vocab, dtype=torch.bool).index_fill_(0, loud, False)
    assert (noise[others] < QUIET + 1e-3).all()
    assert (noise[loud] > QUIET - 1e-3).all()
    assert noise.min() > FAINTEST - 1e-3


@given(st.integers(0, 70_000), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_noise_of_single_tokens_has_the_bits_of_the_whole_row(count: int, seed: int) -> None:
    """For any number of tokens, although vector code and scalar tails round logarithms differently."""
    random = torch.Generator().manual_seed(seed)
    row = torch.randint(4, (count,), generator=random)
    ids = torch.randint(WIDE, (count,), generator=random)
    keys = keys_of(seed, 4)
    assert torch.equal(gumbel_at(keys[row], ids, WIDE), gumbel(keys, WIDE)[row, ids])


def rows_of(*params: dict[str, Any]) -> list[RowSampling]:
    return [RowSampling(i, SamplingParams(**p), 5 + i, 0, [7, 8, 9, 8], 1, (2,)) for i, p in enumerate(params)]


MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 50},
    {"temperature": 1.3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_p": 0.1, "logit_bias": {3: 4.0}, "banned_tokens": [1, 2]},
)


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_and_single_children_are_those_of_all_noise(shape: str, rejection: bool) -> None:
    """Every kind of row in one batch, with padding ids beyond the tokenizer's, and likely tokens of the text."""
    rows = rows_of(*MIXED)
    draws = Draws(rows, WIDE, num_ids=WIDE - 5, rejection=rejection)
    logits = logits_of(shape, len(rows), WIDE, 1)
    logits[:, 7:10] += 12.0
    at = draws.roots()
    scores = draws.scores(logits, at)
    largest = torch.where(scores.amax(1) > -math.inf, scores.argmax(1), -1)
    assert torch.equal(draws.draw(logits, at), largest)
    wide, narrow = draws.children(logits, at, 1), draws.children(logits, at, 1, survival=False)
    assert narrow.survival is None
    assert torch.equal(wide.tokens, narrow.tokens)
    if wide.law is not None and narrow.law is not None:
        assert torch.equal(wide.law, narrow.law)
        law = draws.probs(logits.nan_to_num(nan=0.0), at).log()
        assert torch.equal(
            draws.recover(law, at), (law + draws._noise.rows(draws._keys_at(at, Purpose.RECOVER))).argmax(1)
        )


@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]), min_size=9, max_size=9))
)
def test_first_largest_is_torchs_argmax(values: list[list[float]]) -> None:
    x = torch.tensor(values).reshape(-1, 9)
    assert torch.equal(first_largest(x)[:, 0], x.argmax(1))
