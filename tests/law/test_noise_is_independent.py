"""Noise is as good as independent, and a draw is a function of text, parameters, seed and position alone."""

import math

import pytest
import torch
from torch import Tensor

from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import Purpose, absorb, gumbel, hash_bits, mix, signed, uniform
from forerun.sampling.params import SamplingParams
from kit.laws import chi_square

VOCAB = 4096


def keys_of(words: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor([signed(mix(w)) for w in words])


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("along", ["tokens", "positions"])
def test_every_byte_of_the_hash_is_uniform(shift: int, along: str) -> None:
    if along == "tokens":
        bits = hash_bits(keys_of([(3, n) for n in range(16)]), 32_768)
    else:
        bits = hash_bits(absorb(torch.full((60_000,), 9), torch.arange(60_000)), 8)
    counts = torch.bincount((bits.flatten() >> shift) & 255, minlength=256)
    assert 1e-4 < chi_square(counts, torch.full((256,), bits.numel() / 256)) < 1 - 1e-4


WORDS = ["seed", "sample", "purpose", "root", "position"]


@pytest.mark.short("position")
@pytest.mark.parametrize("word", range(len(WORDS)), ids=WORDS)
def test_neighbouring_keys_are_uncorrelated(word: int) -> None:
    """Keys that differ in one word by one: correlation of the uniforms, and of all pairs of their bits."""
    base = [17, 0, Purpose.COUPLED, 0, 100]
    rows = [tuple(w + (step if i == word else 0) for i, w in enumerate(base)) for step in range(5)]
    bits = hash_bits(keys_of(rows), 65_536)
    values = bits.double() / 2**31
    correlation = torch.corrcoef(values) - torch.eye(5)
    assert correlation.abs().max() < 4.5 / math.sqrt(65_536)
    spread = (bits[:2, None] >> torch.arange(32)[:, None]) & 1  # [2, 32, vocab]
    agreement = (spread[0][:, None] == spread[1][None]).double().mean(2)
    assert (agreement - 0.5).abs().max() < 5 * 0.5 / math.sqrt(65_536)


def test_neighbouring_tokens_are_uncorrelated_across_keys() -> None:
    values = hash_bits(absorb(torch.full((40_000,), 1), torch.arange(40_000)), 24).double() / 2**31
    correlation = torch.corrcoef(values.T) - torch.eye(24)
    assert correlation.abs().max() < 5 / math.sqrt(40_000)


def test_pairs_and_triples_of_positions_are_uniform() -> None:
    """Uniforms of one token at consecutive positions: two- and three-dimensional uniformity."""
    keys = absorb(torch.full((120_000,), 77), torch.arange(120_000))
    u = uniform(keys, torch.zeros_like(keys))
    pairs = (u[0::2] * 16).long() * 16 + (u[1::2] * 16).long()
    assert chi_square(torch.bincount(pairs, minlength=256), torch.full((256,), len(pairs) / 256)) > 1e-4
    triples = ((u * 6).long().view(-1, 3) * torch.tensor([36, 6, 1])).sum(1)
    assert chi_square(torch.bincount(triples, minlength=216), torch.full((216,), len(triples) / 216)) > 1e-4


def test_gumbel_has_the_gumbel_distribution() -> None:
    g = gumbel(absorb(torch.full((200,), 5), torch.arange(200)), VOCAB).double().flatten()
    n = g.numel()
    assert abs(g.mean().item() - 0.5772156649) < 4 * math.pi / math.sqrt(6 * n)
    assert abs(g.var().item() - math.pi**2 / 6) < 0.02
    counts = torch.histc((-(-g).exp()).exp(), bins=200, min=0, max=1)
    assert chi_square(counts, torch.full((200,), n / 200)) > 1e-4


def test_the_tail_of_gumbel_noise_is_not_cut_off() -> None:
    """The largest of n Gumbels lies near log n: with 16 bits it would stop at 11.8."""
    g = gumbel(absorb(torch.full((64,), 2), torch.arange(64)), 150_000)
    n = g.numel()
    above = (g > 12.0).sum().item()
    expected = n * -math.expm1(-math.exp(-12.0))
    assert abs(above - expected) < 4 * math.sqrt(expected)
    assert math.log(n) - 2 < g.max() < 23


def test_a_draw_depends_on_seed_sample_and_position_and_on_no_id() -> None:
    def drawn(seq_id: int = 0, seed: int = 1, sample: int = 0, length: int = 4) -> int:
        draws = Draws([RowSampling(seq_id, SamplingParams(), seed, sample, [7] * length, 2)], VOCAB)
        return int(draws.draw(torch.zeros(1, VOCAB), draws.roots()).item())

    assert drawn() == drawn(seq_id=99)
    assert len({drawn(), drawn(seed=2), drawn(sample=1), drawn(length=5)}) == 4


def test_inner_rounds_share_only_the_noise_of_positions() -> None:
    """After the same root, inner rounds of different outer rounds or levels have different noise."""
    flat, text = torch.zeros(1, VOCAB), [1, 2, 3, 4]

    def inner(start: int, *steps: int, rejection: bool) -> Draws:
        draws = Draws([RowSampling(0, SamplingParams(), 5, 0, text[:start], 1)], VOCAB, rejection=rejection)
        for end in steps:
            draws = draws.within([0], [text[len(draws.rows[0].tokens) : end]])
        return draws

    for rejection, num_draws in ((True, 6), (False, 1)):
        rounds = [
            inner(4, rejection=rejection),
            inner(4, 4, rejection=rejection),
            inner(3, 4, rejection=rejection),
            inner(2, 4, rejection=rejection),
            inner(2, 3, 4, rejection=rejection),
            inner(2, 2, 4, rejection=rejection),
        ]
        assert all(list(r.rows[0].tokens) == text for r in rounds)
        token = torch.tensor([3])
        assert len({r.coins(r.roots(), token).item() for r in rounds}) == 6
        assert len({r.recover(flat, r.roots()).item() for r in rounds}) == 6
        assert len({r.draw(flat, r.roots()).item() for r in rounds}) == num_draws
        assert len({r.children(flat, r.roots(), 1).tokens.item() for r in rounds}) == num_draws
