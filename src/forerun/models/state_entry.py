"""StateEntry: how layers that read each token beside the state before it let both in.

EAGLE's layers and MTP modules do so, each in a way of its own. This file decides which ways the compiled kernels know
(`Entry` in chain.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.annotations import Float
from forerun.models.linear import Linear


@dataclass(frozen=True, slots=True)
class StateEntry:
    """Token and state, each normed where there is a gain, are joined, the token first unless `state_first`.

    `map` makes the residual stream of them, which attention then reads: normed, or as it is (`reads_stream`). Without
    a map attention reads the two themselves, and the stream is the state: as it came, or normed (`normed_stream`). What
    the layers make of it, behind `output_norm`, is the state before the next token.
    """

    map: Linear | None
    token_norm: Float[Tensor, " hidden"] | None
    state_norm: Float[Tensor, " hidden"] | None
    output_norm: Float[Tensor, " hidden"] | None
    state_first: bool = False
    normed_stream: bool = False
    reads_stream: bool = False
