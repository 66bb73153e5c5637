"""Triton kernel: attention of long reads, whose keys lie in contiguous slots.

It gives the same bits as `attend_splits` and `join_splits`: the same sums over the same splits of keys, joined in the
same order. But one program computes all splits of its tile, and the partial sums stay in registers.
"""

from __future__ import annotations

import triton.language as tl

from forerun.models.backends.gpu.triton_kernels import attend_block, kernel


@kernel
def attend_run(
    query, keys, values, out, tables, positions, firsts, counts, sinks,
    scale, cap, kv_stride, slot_stride, num_blocks, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The attention output of each row, for tiles of rows whose keys are contiguous.

    Program i computes the i-th tile from the end, so that the longest texts start first.
    """
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first, count = tl.load(firsts + i), tl.load(counts + i)
    lanes = tl.arange(0, TILE)
    lane_query = lanes // GROUP
    valid = lane_query < count
    place = tl.load(positions + first + lane_query, mask=valid, other=-1)
    last = tl.max(place, 0)
    low = 0 * count
    if WINDOWED:
        low = tl.maximum(tl.min(tl.where(valid, place, 2147483647), 0) - window + 1, 0) // SPLIT
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    at = ((first + lane_query) * HEADS + kv_head * GROUP + lanes % GROUP).to(tl.int64) * HEAD_DIM
    q = tl.load(query + at[:, None] + dims[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    start = tl.load(tables + i * num_blocks).to(tl.int64) * BLOCK_SIZE
    keys += kv_head.to(tl.int64) * kv_stride + start * slot_stride
    values += kv_head.to(tl.int64) * kv_stride + start * slot_stride
    top = tl.full((TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + kv_head * GROUP + lanes % GROUP).to(tl.float32)
        top = tl.full((TILE,), 1.4426950408889634, tl.float32) * sink
        weight += 1.0
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    for split in range(low, last // SPLIT + 1):
        part_top = tl.full((TILE,), float("-inf"), tl.float32)
        part_weight = tl.zeros((TILE,), tl.float32)
        part = tl.zeros((TILE, WIDTH), tl.float32)
        for step in range(SPLIT // BLOCK_KEYS):
            key = split * SPLIT + step * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            here = key <= last
            slot = key.to(tl.int64) * slot_stride
            k = tl.load(keys + slot[None, :] + dims[:, None], mask=here[None, :] & inside[:, None], other=0.0)
            seen = key[None, :] <= place[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > place[:, None] - window)
            v = tl.load(values + slot[:, None] + dims[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            part_top, part_weight, part = attend_block(q, k, v, seen, scale, cap, part_top, part_weight, part, CAPPED)
        joined = tl.maximum(top, part_top)
        floor = tl.where(joined == float("-inf"), 0.0, joined)
        old, new = tl.exp2(top - floor), tl.exp2(part_top - floor)
        weight = weight * old + part_weight * new
        acc = acc * old[:, None] + part * new[:, None]
        top = joined
    acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])
