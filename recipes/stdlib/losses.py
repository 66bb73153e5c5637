"""What a student learns by: the distance between its law and the target's, with acceptance as the aim.

A guess is accepted with probability alpha = sum of min(p, q) = 1 - TV(p, q). KL teaches from far away, TV is the aim
itself but has hardly a gradient there; LK-lambda goes from one to the other as alpha grows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Logits = Float[Tensor, "rows vocab"]


def forward_kl(target: Logits, student: Logits) -> Float[Tensor, ""]:
    """KL(p || q), the mean over rows, in nats."""
    p, log_p, log_q = target.softmax(-1), target.log_softmax(-1), student.log_softmax(-1)
    return (p * (log_p - log_q)).sum(-1).mean()


def acceptance(target: Logits, student: Logits) -> Float[Tensor, ""]:
    """The sum of min(p, q), the mean over rows: how often rejection sampling accepts at temperature 1."""
    return torch.minimum(target.softmax(-1), student.softmax(-1)).sum(-1).mean()


def lk_lambda(target: Logits, student: Logits) -> Float[Tensor, ""]:
    """w KL + (1 - w) TV with w = exp(-3 alpha), alpha the mean acceptance, without gradient (arXiv 2602.23881)."""
    alpha = acceptance(target, student)
    weight = torch.exp(-3 * alpha.detach())
    return weight * forward_kl(target, student) + (1 - weight) * (1 - alpha)
