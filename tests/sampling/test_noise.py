"""Noise, bit for bit: compared with a plain-integer reference, across batch shapes, and at the ends of its range."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.sampling.noise import Purpose, _minus_uniform, absorb, gumbel, hash_bits, mix, signed, uniform

words = st.integers(0, 2**64 - 1)


def reference_mix(key: int, word: int) -> int:
    z = ((key ^ word) + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def reference_round(x: int, key: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D + key) % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def reference_bits(key: int, token: int) -> int:
    return reference_round(reference_round(token, 0) ^ (key % 2**32), key >> 32)


@given(st.lists(words, min_size=1, max_size=5))
def test_mix_and_absorb_agree_with_plain_integers(sequence: list[int]) -> None:
    expected = 0
    for word in sequence:
        expected = reference_mix(expected, word)
    assert mix(sequence) == expected
    key = torch.tensor([signed(mix(sequence[:-1]))])
    assert absorb(key, torch.tensor([signed(sequence[-1])])).item() % 2**64 == expected


@given(words, st.integers(1, 300))
def test_hash_agrees_with_plain_integers(key: int, vocab: int) -> None:
    bits = hash_bits(torch.tensor([signed(key)]), vocab)[0]
    assert [b % 2**32 for b in bits.tolist()] == [reference_bits(key, token) for token in range(vocab)]


@given(words, st.integers(0, 2**31 - 1))
def test_single_uniforms_read_the_same_bits(key: int, token: int) -> None:
    got = uniform(torch.tensor([signed(key)]), torch.tensor([token])).item()
    assert 0 < got < 1
    assert abs(got - (reference_bits(key, token) + 0.5) / 2**32) < 2**-23


@given(st.integers(0, 2**32 - 1))
def test_uniforms_have_32_bits_near_zero(bits: int) -> None:
    w = -Fraction(_minus_uniform(torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32)).item())
    exact = (bits + Fraction(1, 2)) / 2**32
    assert 0 < w < 1
    assert abs(w - exact) <= max(exact / 2**22, Fraction(0)), "relative error above two units in the last place"
    if bits < 2**22:
        assert w == exact


def test_extreme_bits_give_finite_noise() -> None:
    w = -_minus_uniform(torch.tensor([0, 1, -1, -(2**31), 2**31 - 1], dtype=torch.int32))
    assert w.tolist() == [2**-33, 3 * 2**-33, 1 - 2**-24, 0.5, 0.5]
    noise = -(-(-w).log1p()).log()
    assert noise.isfinite().all()
    assert noise[0].item() == pytest.approx(33 * 0.6931471805599453)


@pytest.mark.parametrize("vocab", [1, 31, 32, 50, 4096, 32_737, 70_001])
def test_noise_of_a_row_does_not_depend_on_other_rows(vocab: int) -> None:
    keys = absorb(torch.full((9,), 11), torch.arange(9))
    together = gumbel(keys, vocab)
    assert together.shape == (9, vocab)
    assert together.isfinite().all()
    for row in range(9):
        assert torch.equal(gumbel(keys[row : row + 1], vocab)[0], together[row])
    assert torch.equal(gumbel(keys[2:5], vocab), together[2:5])


def test_noise_does_not_depend_on_vocabulary_or_threads() -> None:
    keys = absorb(torch.full((3,), 5), torch.arange(3))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wide = gumbel(keys, 100_000)
        torch.set_num_threads(3)
        assert torch.equal(gumbel(keys, 100_000), wide)
        assert torch.equal(gumbel(keys, 777), wide[:, :777])
    finally:
        torch.set_num_threads(threads)


def test_keys_differ_if_any_word_differs() -> None:
    keys = {
        mix((seed, sample, purpose, root, position))
        for seed in (0, 1, 2**63)
        for sample in range(3)
        for purpose in Purpose
        for root in range(3)
        for position in range(20)
    }
    assert len(keys) == 3 * 3 * len(Purpose) * 3 * 20
    assert mix((1, 2)) != mix((2, 1))
    assert mix((1,)) != mix((1, 0))
