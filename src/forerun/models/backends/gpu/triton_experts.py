"""Triton kernels of a mixture of experts: routing, the products of each expert with its rows, and their sum.

The host does not know the routing. Grids are large enough for any routing, and programs without work end at once. A
row and one of its experts are a *pair*; pair p belongs to row p // active. The bits of a pair's product do not depend
on the other pairs in its tile: it sums like `one_gemm`, or like `group_gemm`.
"""

from __future__ import annotations

import triton.language as tl

from forerun.models.backends.gpu.group_kernels import sum_groups
from forerun.models.backends.gpu.triton_kernels import OPTIONS, kernel, sum_products

__all__ = ["OPTIONS", "add_experts", "choose_experts", "expert_gemm", "group_expert_gemm", "sort_by_expert"]


@kernel
def choose_experts(
    logits, positions, chosen, weights, gates,
    COUNT: tl.constexpr, LANES: tl.constexpr, ACTIVE: tl.constexpr, RANKS: tl.constexpr,
    NORMALISED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The experts of a row, by descending logit (ties: the lowest index first), and their weights: a softmax over the
    chosen ones (NORMALISED) or over all. A row without position gets COUNT, which is no expert. With GATED the last
    logit is the gate of the shared expert."""
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    ranks = tl.arange(0, RANKS)
    source = logits + row.to(tl.int64) * (COUNT + 1 if GATED else COUNT)
    left = tl.load(source + lanes, mask=lanes < COUNT, other=float("-inf")).to(tl.float32)
    top = tl.max(left, 0)
    total = tl.sum(tl.exp(left - top), 0)
    of_chosen = 0.0 * top
    numbers = tl.full((RANKS,), COUNT, tl.int32)
    powers = tl.zeros((RANKS,), tl.float32)
    for rank in range(ACTIVE):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, lanes, COUNT), 0)
        power = tl.exp(best - top)
        numbers = tl.where(ranks == rank, expert, numbers)
        powers = tl.where(ranks == rank, power, powers)
        of_chosen += power
        left = tl.where(lanes == expert, float("-inf"), left)
    if NORMALISED:
        total = of_chosen
    numbers = tl.where(tl.load(positions + row) >= 0, numbers, COUNT)
    tl.store(chosen + row * ACTIVE + ranks, numbers, mask=ranks < ACTIVE)
    tl.store(weights + row * ACTIVE + ranks, powers / total, mask=ranks < ACTIVE)
    if GATED:
        gate = tl.load(source + COUNT).to(tl.float32)
        tl.store(gates + row, 1.0 / (1.0 + tl.exp(tl.minimum(-gate, 80.0))))


@kernel
def sort_by_expert(
    chosen, order, table, num_read, pairs,
    COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Sort the pairs by expert, in one program. `table` has three rows of LANES, by expert: the number of tiles of ROWS
    pairs up to its last, and the begin and the end of its pairs in `order`. COUNTED: adds the number of experts with
    any pairs to `num_read`."""
    experts = tl.arange(0, LANES)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((LANES,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        expert = tl.load(chosen + begin + lanes, mask=begin + lanes < pairs, other=LANES)
        counts += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    ends = tl.cumsum(counts, 0)
    tiles = tl.where(experts < COUNT, (counts + ROWS - 1) // ROWS, 0)
    tl.store(table + experts, tl.cumsum(tiles, 0))
    tl.store(table + LANES + experts, ends - counts)
    tl.store(table + 2 * LANES + experts, ends)
    if COUNTED:
        tl.store(num_read, tl.load(num_read) + tl.sum(((counts > 0) & (experts < COUNT)).to(tl.int32), 0))
    free = ends - counts
    for begin in range(0, pairs, BLOCK):
        expert = tl.load(chosen + begin + lanes, mask=begin + lanes < pairs, other=LANES)
        of_expert = expert[:, None] == experts[None, :]
        before = (expert[:, None] == expert[None, :]) & (lanes[None, :] < lanes[:, None])
        place = tl.sum(tl.where(of_expert, free[None, :], 0), 1) + tl.sum(before.to(tl.int32), 1)
        tl.store(order + place, begin + lanes, mask=expert < COUNT)
        free += tl.sum(of_expert.to(tl.int32), 0)


@kernel
def expert_gemm(
    x, weight, bias, out, order, table, outputs,
    WIDTH: tl.constexpr, LANES: tl.constexpr, SHARING: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one expert times its weights. SHARING consecutive pairs read the same row of `x`."""
    expert = expert_of(table, LANES)
    if expert < LANES:
        pair, here = pairs_of(order, table, expert, LANES, ROWS)
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = column < outputs
        stacked_output = expert.to(tl.int64) * outputs + column
        acc = sum_products(x + (pair // SHARING).to(tl.int64) * WIDTH, weight + stacked_output * WIDTH, here, inside,
                           WIDTH, ROWS, OUTPUTS, INPUTS)  # fmt: skip
        if BIASED:
            acc += tl.load(bias + stacked_output, mask=inside, other=0.0).to(tl.float32)[None, :]
        out_at = out + pair[:, None].to(tl.int64) * outputs + column[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=here[:, None] & inside[None, :])


@kernel
def group_expert_gemm(
    x, numbers, scales, least, bias, out, order, table, outputs,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr, BIASED: tl.constexpr,
    PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    LANES: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """As `expert_gemm`, with group-quantized weights."""
    expert = expert_of(table, LANES)
    if expert < LANES:
        pair, here = pairs_of(order, table, expert, LANES, ROWS)
        total = sum_groups(
            x + (pair // SHARING).to(tl.int64) * WIDTH, here, numbers, scales, least, bias,
            expert.to(tl.int64) * outputs, tl.program_id(1) * OUTPUTS, outputs,
            WIDTH, CHUNKS, KIND, BYTES, PARTS, SLICES, AT_ONCE, SCALED, LEAST, BIASED, PTX, ROWS, OUTPUTS, STAGES,
        )  # fmt: skip
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        out_at = out + pair[:, None].to(tl.int64) * outputs + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=here[:, None] & (column < outputs)[None, :])


@kernel
def expert_of(table, LANES: tl.constexpr):
    """The expert of this program's tile; LANES if the tile is empty."""
    ends = tl.load(table + tl.arange(0, LANES))
    return tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0)


@kernel
def pairs_of(order, table, expert, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The pairs of this program's tile, all of this expert, and a mask of its ROWS."""
    passed = tl.load(table + expert - 1, mask=expert > 0, other=0)
    first = tl.load(table + LANES + expert) + (tl.program_id(0) - passed) * ROWS
    here = tl.arange(0, ROWS) < tl.load(table + 2 * LANES + expert) - first
    return tl.load(order + first + tl.arange(0, ROWS), mask=here, other=0), here


@kernel
def add_experts(
    outputs, chosen, weights, dense, gates, out,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, ACTIVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weighted sum of the outputs of a row's experts, in the order of `chosen`, then of the shared expert's."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(ACTIVE):
        pair = row * ACTIVE + rank
        used = tl.load(chosen + pair) < COUNT
        value = tl.load(outputs + pair * WIDTH + columns, mask=inside & used, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair)
    if GATED:
        total += tl.load(dense + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(gates + row)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)
