"""Memory of an engine: plans the memory for a target and a drafter before they are loaded.

This file decides the memory budget if the user gave none, and how many cache slots the draft tokens of a request need.
It warns if the plan leaves a drafter without memory. The arithmetic is in `cache/plan.py`.
"""

from __future__ import annotations

import logging

import torch

from forerun.cache.plan import MemoryPlan, MemoryShares
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import slots_of
from forerun.device import free_bytes
from forerun.draft.base import Budget
from forerun.draft.plan import DraftPlan
from forerun.engine.scheduler import MAX_CHUNK_TOKENS
from forerun.errors import InvalidRequest
from forerun.machine import available_bytes
from forerun.models.backends.gpu.memory import PassSizes
from forerun.models.loading import Blueprint

BUDGET_SHARE = 0.8  # of the available memory; the rest is for other programs and, on CPUs, for activations
LOGGER = logging.getLogger("forerun")


def plan_engine(
    target: Blueprint,
    drafter: DraftPlan,
    speculation: Speculation,
    max_model_len: int | None,
    max_num_seqs: int,
    memory_bytes: int | None,
) -> MemoryPlan:
    """Plan memory for texts of `max_model_len` tokens; if None, for the longest texts that fit.

    `speculation` is the default of requests. Raises NotEnoughMemory if not even one sequence fits, InvalidRequest if
    `max_model_len` exceeds the target's positions.
    """
    limit, device = target.config.max_positions, target.placement.device
    if max_model_len is not None and max_model_len > limit:
        raise InvalidRequest(
            "max_model_len", f"{max_model_len} must be at most {limit}, the positions of {target.name}."
        )
    if memory_bytes is None:
        memory_bytes = default_budget(device)
    shares = MemoryShares(
        target.memory,
        drafter.models,
        budget_bytes=memory_bytes,
        max_num_seqs=max_num_seqs,
        tail_tokens=tail_tokens(speculation, drafter.num_members, max_model_len or limit),
        remembered_bytes=drafter.remembered_bytes if device.type == "cpu" else {},
    )
    plan = shares.plan(max_model_len)
    for name in plan.silent_drafters:
        LOGGER.warning(
            "%s will not draft: there is no memory left for its KV cache; raise memory_bytes, or lower max_model_len "
            "from %d",
            name,
            plan.max_model_len,
        )
    return plan


def default_budget(device: torch.device) -> int:
    """The memory in bytes that an engine may use if the user sets no limit."""
    available = free_bytes(device) if device.type == "cuda" else available_bytes()
    if device.type == "mps":  # the GPU shares the host's memory, up to a limit
        available = min(available, free_bytes(device))
    return int(available * BUDGET_SHARE)


def pass_sizes(options: EngineOptions, drafts: bool) -> PassSizes:
    """Upper bounds of the passes of an engine with these options, for requests with the default speculation."""
    speculation, batch = options.speculation, options.max_num_seqs
    num_drafted = speculation.nodes_within(speculation.depth) if drafts else 0
    chunk = options.chunk_tokens if isinstance(options.chunk_tokens, int) else MAX_CHUNK_TOKENS
    nodes = batch * (1 + num_drafted)
    return PassSizes(rows=chunk + nodes, judged=nodes, drafted=batch if speculation.width == 1 else nodes)


def tail_tokens(speculation: Speculation, num_members: int, max_model_len: int) -> int:
    """The most cache slots beyond `max_model_len` that a sequence's draft tokens need, with `num_members` drafters.

    A text of n tokens is drafted at most `max_model_len` - n - 1 tokens deep, so a chain always ends within the
    context. A tree needs more: its nodes are stored after the slots of its longest path.
    """
    budget = Budget.of(speculation, max_model_len - 2)
    slots = slots_of(budget if num_members == 1 else budget.merged(num_members))
    return max(0, slots - budget.depth - 1)
