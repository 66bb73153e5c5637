"""Rotary position embeddings: tables of cosines and sines by position, for each supported scaling.

Angles are computed in float32 with the order of operations of Hugging Face transformers, so that logits agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.models.config import ModelConfig
from forerun.models.rope_config import RopeConfig

# torch computes cosines of longer tensors in several threads. If that happened in the first call of a process, half of
# the table had errors of 1e-4 in one of twelve processes (torch 2.13 with MKL), so tables are computed in short pieces.
SERIAL_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Row t belongs to position t. The two halves of a row are equal: elements i and i + head_dim/2 are a rotary pair.

    A second table, for layers that use other parameters, follows the first; then the table of growing queries.
    """

    cos: Float[Tensor, "rows head_dim"]
    sin: Float[Tensor, "rows head_dim"]

    def to(self, device: torch.device) -> RopeTables:
        """The tables on `device`. They are computed on the CPU, so that they have the same bits on every device."""
        return RopeTables(self.cos.to(device), self.sin.to(device))


def rope_tables(config: ModelConfig) -> RopeTables:
    """The tables for positions 0 to max_positions - 1, in float32, multiplied by the attention factor.

    Length-dependent scalings use `longest_text`, so that rotations depend neither on the length of a text nor on the
    number of positions that fit into memory.
    """
    tables = [rope_table(config, rope) for rope in (config.rope, config.local_rope)[: config.num_rope_tables]]
    if config.grows_queries:
        growth = query_growth(config.rope, config.max_positions)
        tables.append((tables[0][0] * growth, tables[0][1] * growth))
    return RopeTables(torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables]))


def rope_table(config: ModelConfig, rope: RopeConfig | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of one table; without a `rope`, those of the identity."""
    half = config.head_dim // 2
    if rope is None:
        return torch.ones(config.max_positions, 2 * half), torch.zeros(config.max_positions, 2 * half)
    rotated = FREQUENCIES[rope.kind](
        rope, config.rotary_dim or config.head_dim, config.longest_text or config.max_positions
    )
    frequencies = torch.cat([rotated, rotated.new_zeros(half - len(rotated))])
    positions = torch.arange(config.max_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies  # [positions, head_dim / 2]
    factor = torch.ones(half)  # elements that are not rotated are not scaled
    factor[: len(rotated)] = attention_factor(rope)
    parts = angles.split(max(1, SERIAL_ELEMENTS // angles.shape[1]))
    cos, sin = (torch.cat([function(part) for part in parts]) * factor for function in (torch.cos, torch.sin))
    return torch.cat([cos, cos], dim=1), torch.cat([sin, sin], dim=1)


def query_growth(rope: RopeConfig, positions: int) -> Float[Tensor, "positions 1"]:
    """The factor of queries at each position: 1 + beta ln(1 + n), n = position // original context. Ministral 3."""
    passed = torch.arange(positions) // rope.original_max_positions
    growth = [1 + rope.query_beta * math.log(1 + n) for n in range(int(passed[-1]) + 1)]
    return torch.tensor(growth)[passed, None]


def default_frequencies(rope: RopeConfig, head_dim: int, positions: int = 0) -> Float[Tensor, " half"]:
    """Radians per position: theta^(-2i/head_dim). Su et al. 2104.09864, section 3.2.2."""
    return 1.0 / periods(rope, head_dim)


def linear_frequencies(rope: RopeConfig, head_dim: int, positions: int) -> Float[Tensor, " half"]:
    """Frequencies divided by `factor` (position interpolation). Chen et al. 2306.15595."""
    frequencies: Tensor = default_frequencies(rope, head_dim) / rope.factor
    return frequencies


def llama3_frequencies(rope: RopeConfig, head_dim: int, positions: int) -> Float[Tensor, " half"]:
    """Low frequencies divided by `factor`, high ones unchanged, those in between interpolated. Llama 3.1.

    A frequency is low or high by the number of its full rotations within the original context.
    """
    frequencies = default_frequencies(rope, head_dim)
    wavelengths = 2 * math.pi / frequencies
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    kept = (context / wavelengths - low) / (high - low)
    between = (1 - kept) * frequencies / rope.factor + kept * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def longrope_frequencies(rope: RopeConfig, head_dim: int, positions: int) -> Float[Tensor, " half"]:
    """Each frequency divided by its own factor: a long one if texts may exceed the original context, else a short one.

    Ding et al. 2402.13753.
    """
    factors = rope.long_factors if positions > rope.original_max_positions else rope.short_factors
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods(rope, head_dim))


def yarn_frequencies(rope: RopeConfig, head_dim: int, positions: int) -> Float[Tensor, " half"]:
    """High frequencies unchanged, low ones divided by `factor`, a linear ramp between. Peng et al. 2309.00071, 3.2."""
    first, last = (yarn_dimension(rope, head_dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, as in training
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    slow, fast = 1.0 / (rope.factor * periods(rope, head_dim)), default_frequencies(rope, head_dim)
    kept = 1 - ramp
    return slow * (1 - kept) + fast * kept


def yarn_dimension(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """The dimension of a head whose pairs make `rotations` full rotations within the original context."""
    turns = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))


def attention_factor(rope: RopeConfig) -> float:
    """The factor of cosines and sines in yarn and longrope; 1 for other kinds.

    Peng et al. 2309.00071, equation 22; Ding et al. 2402.13753, section 3.3.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions)) if rope.factor > 1 else 1.0
    if rope.mscale is None or rope.mscale_all_dim is None:
        return yarn_mscale(rope.factor, 1.0)
    return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The mscale of yarn: 1 + mscale ln(factor) / 10 for a longer context, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def periods(rope: RopeConfig, head_dim: int) -> Float[Tensor, " half"]:
    """theta^(2i/head_dim) for each pair i of a head."""
    exponents: Tensor = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(rope.theta, exponents)


FREQUENCIES: dict[str, Callable[[RopeConfig, int, int], Tensor]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
}
