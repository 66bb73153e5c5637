"""The memory of an engine: a model and a drafter that are known but not loaded, as arguments of the memory plan.

Decides what `plan_memory` is asked: how many cache slots a request's guesses need, and how long texts may be where the
user did not say. The arithmetic is that of `cache/plan.py`; nothing is loaded here.
"""

from __future__ import annotations

from forerun.cache.plan import BUDGET_SHARE, MemoryPlan, plan_memory
from forerun.config import Speculation
from forerun.device import free_bytes
from forerun.draft.base import Budget
from forerun.draft.build import DraftPlan
from forerun.engine.controller import slots_of
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.models.loading import Blueprint

LEAST_LEN = 1024  # a context is not cut below this to make it fit unasked


def plan_engine(
    target: Blueprint,
    drafter: DraftPlan,
    wish: Speculation,
    max_model_len: int | None,
    max_num_seqs: int,
    memory_bytes: int | None,
) -> MemoryPlan:
    """Share out memory for texts of `max_model_len` tokens; where none is asked for, for the longest that fit.

    `wish` is how far a request is drafted unless it says otherwise.
    """
    limit, device = target.config.max_positions, target.placement.device
    if max_model_len is not None and max_model_len > limit:
        raise InvalidRequest(
            "max_model_len", f"{max_model_len} must be at most {limit}, the positions of {target.name}."
        )
    if memory_bytes is None and device.type == "cuda":
        memory_bytes = int(free_bytes(device) * BUDGET_SHARE)

    def plan(length: int) -> MemoryPlan:
        return plan_memory(
            weights_bytes=target.weights_bytes + drafter.weights_bytes,
            target_bytes_per_token=target.bytes_per_token,
            drafter_bytes_per_token=drafter.bytes_per_token,
            remembered_bytes=drafter.remembered_bytes if device.type == "cpu" else {},
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            tail_tokens=tail_tokens(wish, drafter),
            budget_bytes=memory_bytes,
        )

    length = max_model_len or limit
    while max_model_len is None and length >= 2 * LEAST_LEN:
        try:
            return plan(length)
        except NotEnoughMemory:
            length //= 2
    return plan(length)


def tail_tokens(wish: Speculation, drafter: DraftPlan) -> int:
    """Cache slots that one sequence's guesses take at most."""
    budget = Budget.of(wish)
    return slots_of(budget if drafter.num_members == 1 else budget.merging(drafter.num_members))
