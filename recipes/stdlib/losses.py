"""What a student learns by: the distance between its law and the target's, with acceptance as the aim.

A guess is accepted with probability alpha = sum of min(p, q) = 1 - TV(p, q). KL teaches from far away, TV is the aim
itself but has hardly a gradient there; LK-lambda goes from one to the other as alpha grows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Logits = Float[Tensor, "rows vocab"]
Scalar = Float[Tensor, ""]


def distances(log_p: Logits, student: Logits) -> tuple[Scalar, Scalar]:
    """KL(p || q) in nats, and the sum of min(p, q): means over rows, with gradients to the student's logits.

    `log_p` is the target's law as log-probabilities. The sum is how often rejection sampling accepts at temperature 1.
    """
    log_q, p = student.log_softmax(-1), log_p.exp()
    return (p * (log_p - log_q)).sum(-1).mean(), torch.minimum(p, log_q.exp()).sum(-1).mean()


def lk_lambda(kl: Scalar, alpha: Scalar) -> Scalar:
    """w KL + (1 - w) TV with w = exp(-3 alpha), alpha the mean acceptance, without gradient (arXiv 2602.23881)."""
    weight = torch.exp(-3 * alpha.detach())
    return weight * kl + (1 - weight) * (1 - alpha)
