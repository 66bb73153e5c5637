"""Block verification as it is commonly got wrong: what the enumeration must notice, and what `prove` must reject."""

from dataclasses import replace

import pytest
from torch import Tensor

from forerun.tree import DraftTree
from forerun.verify import rules
from forerun.verify.rules import AcceptLaw, block_law, token_law


def token_residual(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    return replace(block_law(tree, p, row), after=token_law(tree, p, row).after)


def first_failure_stops(tree: DraftTree, p: Tensor, row: Tensor) -> AcceptLaw:
    return replace(block_law(tree, p, row), last_success=False)


def joint_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """w_i = min(1, p(x_1..x_i) / q(x_1..x_i)), where the true rule takes the minimum at every step."""
    weights = rules._weights
    monkeypatch.setattr(rules, "_min_ratio", lambda numerator, denominator: numerator / denominator)
    monkeypatch.setattr(rules, "_weights", lambda *args: weights(*args).clamp_max(1))
