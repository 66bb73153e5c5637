"""Counter-based noise: a pure function of (seed, sample, purpose, level, round, position, token).

This file decides how keys are mixed, how a key and a token id become 32 uniform bits, and how these become Gumbel
noise. The bits of a row depend on its key alone, never on the other rows.

A key has 64 bits; its words are absorbed one by one with a 64-bit finaliser (constants of splitmix64). Within a key the
token id is hashed by two rounds of a 32-bit finaliser (constants found by C. Wellons' search, bias 0.17). The first
round does not use the key and is tabulated once per vocabulary; the key enters before and in the middle of the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int

_MASK = 2**64 - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MUL1, _MUL2 = 0x7FEB352D, 0x846CA68B - 2**32

# Elements per call of a transcendental function. torch splits a larger tensor over threads at places that depend on
# its size, and computes the remainder at the end of each part by scalar code, whose bits differ from those of the
# vector code. Blocks below its grain (32768) run on one thread, and multiples of 32 have no remainder.
_LANES = 32
_BLOCK = 32_768 - _LANES

# The first logarithm of a process must not run on several threads: in one process of twelve, half of a first cosine had
# errors of 1e-4 (torch 2.13 with MKL).
torch.zeros(_LANES).log1p_().log_()

# All noise is at least FAINTEST. The _NUM_LOUD smallest words of bits give noise above QUIET, all others at most QUIET.
FAINTEST = -math.log(24 * math.log(2))
_NUM_LOUD = 2**23
QUIET = -math.log(-math.log1p(-(_NUM_LOUD + 0.5) * 2.0**-32))


class Purpose(IntEnum):
    """The purpose of a draw: no two purposes share noise."""

    COUPLED = 0  # the target's own token, and its draft token: keyed by position alone
    DRAFT = 1  # this and the following are for rejection modes: keyed by the round, too
    ACCEPT = 2
    RECOVER = 3


def mix(words: Sequence[int]) -> int:
    """A 64-bit key from host integers (each modulo 2**64); depends on their order and number."""
    key = 0
    for word in words:
        key = ((key ^ (word & _MASK)) + _GOLDEN) & _MASK
        key = ((key ^ (key >> 30)) * _MIX1) & _MASK
        key = ((key ^ (key >> 27)) * _MIX2) & _MASK
        key ^= key >> 31
    return key


@lru_cache(maxsize=4096)  # needed in every round
def coupled_key(seed: int, sample: int) -> int:
    """The key of a sample's coupled noise, without its position."""
    return mix((seed, sample, Purpose.COUPLED, 0, 0))


def absorb(keys: Int[Tensor, " rows"], words: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The result of `mix` with one more word, for many keys at once; the 64 bits are read as int64."""
    if keys.device.type == "cpu":  # numpy takes a third of torch's time, for a few keys in every round
        x = (keys.numpy() ^ words.numpy()).view(np.uint64) + np.uint64(_GOLDEN)
        x = (x ^ x >> 30) * np.uint64(_MIX1)
        x = (x ^ x >> 27) * np.uint64(_MIX2)
        return torch.from_numpy((x ^ x >> 31).view(np.int64))
    keys = (keys ^ words) + signed(_GOLDEN)
    keys = (keys ^ _shift64(keys, 30)) * signed(_MIX1)
    keys = (keys ^ _shift64(keys, 27)) * signed(_MIX2)
    return keys ^ _shift64(keys, 31)


def signed(word: int) -> int:
    """The 64 bits of an unsigned integer as an int64."""
    return word - 2**64 if word >= 2**63 else word


def hash_bits(keys: Int[Tensor, " rows"], vocab: int) -> Int[Tensor, "rows vocab"]:
    """32 uniform bits, as int32, for every token id below `vocab` under every key."""
    low, high = _halves(keys)
    return _keyed_round(_scrambled_ids(vocab, str(keys.device)) ^ low[:, None], high[:, None])


def uniform(keys: Int[Tensor, " rows"], ids: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """One float32 in (0, 1) per pair of key and token id, from the bits of `hash_bits` at this id."""
    low, high = _halves(keys)
    return -_minus_uniform(_keyed_round(_finalise(ids.to(torch.int32)) ^ low, high))


def gumbel(keys: Int[Tensor, " rows"], vocab: int) -> Float[Tensor, "rows vocab"]:
    """Standard Gumbel noise, float32 and always finite, for every token id below `vocab` under every key.

    -log(E) with E = -log1p(-w) exponential and w uniform from 2**-33 to 1 - 2**-24. Near w = 0, where the largest noise
    comes from, all 32 bits matter, so that a token of probability 1e-9 is still sampled with this probability.
    """
    low, high = _halves(keys)
    width = -(-vocab // _LANES) * _LANES
    ids = _scrambled_ids(width, str(keys.device))
    noise = torch.empty(len(keys), width, dtype=torch.float32, device=keys.device)
    for rows, columns in _blocks(len(keys), width, on_cpu=keys.device.type == "cpu"):
        bits = _keyed_round(ids[columns] ^ low[rows, None], high[rows, None])
        noise[rows, columns] = _minus_uniform(bits).log1p_().neg_().log_().neg_()
    return noise[:, :vocab]


def gumbel_at(keys: Int[Tensor, " pairs"], ids: Int[Tensor, " pairs"], vocab: int) -> Float[Tensor, " pairs"]:
    """`gumbel(keys[i], vocab)[ids[i]]` for every i, with the same bits."""
    low, high = _halves(keys)
    bits = _keyed_round(_scrambled_ids(vocab, str(keys.device))[ids] ^ low, high)
    noise = torch.zeros(-(-len(ids) // _LANES) * _LANES, dtype=torch.float32, device=keys.device)
    noise[: len(ids)] = _minus_uniform(bits)
    for part in noise.split(_BLOCK if keys.device.type == "cpu" else max(1, len(noise))):
        part.log1p_().neg_().log_().neg_()
    return noise[: len(ids)]


def loud_ids(key: int, vocab: int) -> Int[Tensor, " loud"]:
    """The ids below `vocab`, in order, whose noise under a key may be above QUIET: one in 512. On CPUs.

    Computes only the hash of each id, which takes a fifth of the time of its noise. numpy takes half of torch's time,
    because its shifts of unsigned words are logical.
    """
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
    scrambled, loud = _scrambled_ids(vocab, "cpu").numpy().view(np.uint32), []
    for start in range(0, vocab, _BLOCK):
        x = scrambled[start : start + _BLOCK] ^ low
        x ^= x >> 16
        x *= np.uint32(_MUL1)
        x += high
        x ^= x >> 15
        x *= np.uint32(_MUL2 % 2**32)
        x ^= x >> 16
        loud.append(np.flatnonzero(x < _NUM_LOUD) + start)
    return torch.from_numpy(np.concatenate(loud))


def _blocks(rows: int, width: int, *, on_cpu: bool) -> list[tuple[slice, slice]]:
    """On CPUs, [rows, width] in pieces of at most _BLOCK elements, multiples of _LANES wide; else one piece."""
    if not on_cpu:
        return [(slice(None), slice(None))]
    if width <= _BLOCK:
        step = _BLOCK // width
        return [(slice(row, row + step), slice(None)) for row in range(0, rows, step)]
    columns = range(0, width, _BLOCK)
    return [(slice(row, row + 1), slice(start, start + _BLOCK)) for row in range(rows) for start in columns]


def _minus_uniform(bits: Int[Tensor, " ..."]) -> Float[Tensor, " ..."]:
    """-w for w = (bits as unsigned + 0.5) / 2**32, rounded to float32 and kept below 1.

    The conversion reads the bits as signed, which is exact near zero; subtracting the ceiling maps the negative half to
    the values of unsigned bits. The 0.5 is added last, since it matters for tiny w only.
    """
    minus = bits.to(torch.float32).mul_(-(2.0**-32))
    minus.sub_(minus.ceil()).sub_(2.0**-33)
    return minus.clamp_(min=-(1 - 2.0**-24))


def _keyed_round(x: Int[Tensor, " ..."], key: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
    """One 32-bit finaliser round with a key added between its multiplications; overwrites and returns x."""
    x.bitwise_xor_(_shift32(x, 16)).mul_(_MUL1).add_(key)
    x.bitwise_xor_(_shift32(x, 15)).mul_(_MUL2)
    return x.bitwise_xor_(_shift32(x, 16))


def _finalise(x: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
    return _keyed_round(x.clone(), torch.zeros((), dtype=torch.int32, device=x.device))


@cache  # never freed, since captured CUDA graphs read it at its address
def _scrambled_ids(vocab: int, device: str) -> Int[Tensor, " vocab"]:
    """The first, unkeyed round of every token id: a constant table, cached because every draw reads it."""
    return _finalise(torch.arange(vocab, dtype=torch.int32, device=device))


def _halves(keys: Int[Tensor, " rows"]) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """The low and the high 32 bits of each key, as int32."""
    halves = keys.contiguous().view(torch.int32).view(-1, 2)
    return halves[:, 0], halves[:, 1]


def _shift64(x: Int[Tensor, " ..."], by: int) -> Int[Tensor, " ..."]:
    """Logical right shift: torch's is arithmetic, so the copies of the sign bit are cleared."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _shift32(x: Int[Tensor, " ..."], by: int) -> Int[Tensor, " ..."]:
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)
