"""Triton kernels: the operations of a pass of fixed shape between its matrix products, and one matrix product.

This file decides how each operation is tiled so that the bits of a row depend on that row alone. A tile has the same
shape for any number of rows; sums run over keys, inputs or splits in a fixed order, that of the row's own text. Triton
is optional: `ops.load_kernels` imports the files of kernels and raises an error with a hint if it is missing. With
TRITON_INTERPRET=1, set before the import, the same code runs on a CPU.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

BLOCK_KEYS = 64
SIZES = ("rows", "num_blocks", "num_splits", "workers", "window", "first_kv_head", "first_head", "query_rope_start",
         "key_rope_start", "pairs")  # fmt: skip
# Options of every launch. By default the compiler may fuse a multiplication with an addition, and decides this for each
# variant of a kernel, so the bits of a row would depend on whether its pass has paths, windows or norms.
OPTIONS = {"enable_fp_fusion": False}


def kernel(function):
    """triton.jit of the undecorated function, since a type checker's import hook may have wrapped it.

    Sizes that differ from pass to pass are not specialized: each specialization takes seconds to compile.
    """
    bare = inspect.unwrap(function)
    return triton.jit(bare, do_not_specialize=[name for name in inspect.signature(bare).parameters if name in SIZES])


@kernel
def attend_splits(
    query, keys, values, largest, total, mixed,
    tables, positions, prefixes, paths, tile_of, firsts, counts, shared,
    scale, cap, kv_stride, slot_stride, num_blocks, num_splits, workers, window, first_kv_head,
    HEADS: tl.constexpr, PART_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PATHS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Partial attention of each row over each of its splits: largest score, sum of weights, weighted sum of values.

    Program i computes the splits that the rows of tile i share (their keys lie in the same slots), for all its rows at
    once, and those that only row i has; `workers` programs share the splits of one i. The partial results hold
    PART_HEADS heads, from those of `first_kv_head` on, to which `keys` and `values` point.
    """
    i = tl.program_id(0)
    kv_head = tl.program_id(1)
    home, first, count = tl.load(tile_of + i), tl.load(firsts + i), tl.load(counts + i)
    position = tl.load(positions + i)
    lanes = tl.arange(0, TILE)
    lane_query, lane_head = lanes // GROUP, kv_head * GROUP + lanes % GROUP
    in_tile = lane_query < count
    tile_positions = tl.load(positions + first + lane_query, mask=in_tile, other=-1)
    tile_last = tl.max(tile_positions, 0)
    tile_end = tl.minimum(tl.load(shared + i), tile_last + 1)
    tile_low, own_low = 0 * count, tl.load(shared + home) // SPLIT
    if WINDOWED:
        earliest = tl.min(tl.where(in_tile, tile_positions, 2147483647), 0)
        tile_low = tl.maximum(earliest - window + 1, 0) // SPLIT
        own_low = tl.maximum(own_low, tl.maximum(position - window + 1, 0) // SPLIT)
    num_tile = tl.maximum((tile_end + SPLIT - 1) // SPLIT - tile_low, 0)
    num_own = tl.maximum((position + SPLIT) // SPLIT - own_low, 0)

    work = tl.program_id(2) + 0 * count
    while work < num_tile + num_own:
        is_own = work >= num_tile
        split = tl.where(is_own, own_low + work - num_tile, tile_low + work)
        rows = tl.where(is_own, i, first) + lane_query
        valid = lane_query < tl.where(is_own, 1, count)
        top, weight, acc = attend_split(
            query + ((rows * HEADS + first_kv_head * GROUP + lane_head) * HEAD_DIM)[:, None],
            keys + kv_head.to(tl.int64) * kv_stride, values + kv_head.to(tl.int64) * kv_stride,
            tables + tl.where(is_own, home, i) * num_blocks, paths + i * PATHS,
            tl.where(is_own, tl.load(prefixes + i), 2147483647),
            split * SPLIT, tl.minimum((split + 1) * SPLIT, tl.where(is_own, position, tile_last) + 1),
            tl.load(positions + rows, mask=valid, other=-1), valid, scale, cap, slot_stride, window,
            HEAD_DIM, WIDTH, TILE, BLOCK_SIZE, PATHS, WINDOWED, CAPPED, SPLIT, BLOCK_KEYS,
        )  # fmt: skip
        dims = tl.arange(0, WIDTH)
        place = (rows * PART_HEADS + lane_head).to(tl.int64) * num_splits + split
        tl.store(largest + place, top, mask=valid)
        tl.store(total + place, weight, mask=valid)
        tl.store(mixed + place[:, None] * HEAD_DIM + dims, acc, mask=valid[:, None] & (dims < HEAD_DIM)[None, :])
        work += workers


@kernel
def attend_split(
    query, keys, values, table, path, prefix, begin, end, positions, valid, scale, cap, slot_stride, window,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PATHS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """A tile's attention over the keys `begin` to `end - 1` of one split, block after block of keys.

    Key j lies in block `table[j // BLOCK_SIZE]` below `prefix`, and in slot `path[j - prefix]` from there on. A row
    sees the keys up to its own position. A block of keys of which it sees none leaves its sums unchanged, to the bit.
    Scores are in base 2 (`score_factors`). With CAPPED `scale` is for twice the argument of tanh, and `cap` the bound.
    """
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    q = tl.load(query + dims[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(SPLIT // BLOCK_KEYS):
        key = begin + step * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        here = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=here, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        if PATHS > 0:
            on_path = here & (key >= prefix)
            slot = tl.where(on_path, tl.load(path + (key - prefix), mask=on_path, other=0).to(tl.int64), slot)
        at = slot * slot_stride
        k = tl.load(keys + at[None, :] + dims[:, None], mask=here[None, :] & inside[:, None], other=0.0)
        seen = key[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] > positions[:, None] - window)
        v = tl.load(values + at[:, None] + dims[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        top, weight, acc = attend_block(q, k, v, seen, scale, cap, top, weight, acc, CAPPED)
    return top, weight, acc


@kernel
def attend_block(q, k, v, seen, scale, cap, top, weight, acc, CAPPED: tl.constexpr):
    """The online-softmax sums after one more block of keys; `seen` masks the keys of each row."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if CAPPED:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(tl.minimum(scores, 100.0)))
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    p, shrink = tl.exp2(scores - floor[:, None]), tl.exp2(top - floor)
    weight = weight * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_top, weight, acc


@kernel
def join_splits(
    largest, total, mixed, positions, sinks, out, num_splits, window, first_head,
    HEADS: tl.constexpr, PART_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Join the partial sums of one row and head, split after split; a row without position gets zeros.

    With SINKS the sum of weights starts with that of the head's sink.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    position = tl.load(positions + row)
    split = 0 * position
    if WINDOWED:
        split = tl.maximum(position - window + 1, 0) // SPLIT
    first = (row * PART_HEADS + head).to(tl.int64) * num_splits
    top = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    if SINKS:
        top = tl.full((1,), 1.4426950408889634, tl.float32) * tl.load(sinks + first_head + head).to(tl.float32)
        weight += 1.0
    acc = tl.zeros((WIDTH,), tl.float32)
    while split < (position + SPLIT) // SPLIT:
        place = first + split
        here = tl.load(largest + place)
        new_top = tl.maximum(top, here)
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, new = tl.exp2(top - floor), tl.exp2(here - floor)
        weight = weight * old + tl.load(total + place) * new
        part = tl.load(mixed + place * HEAD_DIM + dims, mask=inside, other=0.0)
        acc = acc * old + part * new
        top = new_top
        split += 1
    acc = acc / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (row * HEADS + first_head + head) * HEAD_DIM + dims, acc.to(out.dtype.element_ty), mask=inside)


@kernel
def add_norm(
    x, delta, delta_gain, gain, added, normed, eps,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, DELTA_NORMS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """`added` = x + delta (normed first with DELTA_NORMS), and `normed` = the RMS norm of the sum."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < HIDDEN
    at = row.to(tl.int64) * HIDDEN + columns
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(delta + at, mask=inside, other=0.0)
        if DELTA_NORMS:
            more = gained(more, root_mean_square(more, HIDDEN, eps), tl.load(delta_gain + columns, inside, other=0.0))
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(added + at, value, mask=inside)
    if NORMS:
        value = gained(value, root_mean_square(value, HIDDEN, eps), tl.load(gain + columns, inside, other=0.0))
        tl.store(normed + at, value, mask=inside)


@kernel
def root_mean_square(value, HIDDEN: tl.constexpr, eps):
    """The factor of a row in its RMS norm: the reciprocal of its root mean square."""
    wide = value.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)


@kernel
def gained(value, scale, gain):
    """The normed value times its gain: a float32 gain is applied before rounding, others after it."""
    norm = value.to(tl.float32) * scale
    if gain.dtype == value.dtype:
        norm = norm.to(value.dtype).to(tl.float32)
    return (norm * gain.to(tl.float32)).to(value.dtype)


@kernel
def rotate_store(
    qkv, cos, sin, positions, slots, gains, query, keys, values, eps, kv_stride, slot_stride,
    query_rope_start, key_rope_start,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    NORMS: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """One head of one row: norm its query or key (NORMS), rotate it, and store it.

    The rotary tables of the layer begin at rows `query_rope_start` and `key_rope_start`. With JOINT the norm is over
    all query heads, or all key heads, together.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, HALF)
    inside = dims < HEAD_DIM // 2
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    first = tl.load(source + dims, mask=inside, other=0.0)
    second = tl.load(source + HEAD_DIM // 2 + dims, mask=inside, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    if head < HEADS + KV_HEADS:
        kind = first.dtype
        if NORMS:
            begin, count = head, 1
            if JOINT:
                begin = tl.where(head < HEADS, 0, HEADS)
                count = tl.where(head < HEADS, HEADS, KV_HEADS)
            squares = tl.zeros((HALF,), tl.float32)
            for i in range(count):
                other = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + begin + i) * HEAD_DIM + dims
                a = tl.load(other, mask=inside, other=0.0).to(tl.float32)
                b = tl.load(other + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
                squares += a * a + b * b
            scale = tl.rsqrt(tl.sum(squares, 0) / (count * HEAD_DIM) + eps)
            gain = gains + head * HEAD_DIM + dims
            first = gained(first, scale, tl.load(gain, mask=inside, other=0.0))
            second = gained(second, scale, tl.load(gain + HEAD_DIM // 2, mask=inside, other=0.0))
        turn = tl.maximum(tl.load(positions + row), 0).to(tl.int64) + tl.where(
            head < HEADS, query_rope_start, key_rope_start
        )
        c = tl.load(cos + turn * HEAD_DIM + dims, mask=inside, other=0.0)
        s = tl.load(sin + turn * HEAD_DIM + dims, mask=inside, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
    if head < HEADS:
        target = query + (row.to(tl.int64) * HEADS + head) * HEAD_DIM
        tl.store(target + dims, first, mask=inside)
        tl.store(target + HEAD_DIM // 2 + dims, second, mask=inside)
    elif head < HEADS + KV_HEADS:
        target = keys + (head - HEADS).to(tl.int64) * kv_stride + slot * slot_stride
        tl.store(target + dims, first, mask=inside)
        tl.store(target + HEAD_DIM // 2 + dims, second, mask=inside)
    else:
        target = values + (head - HEADS - KV_HEADS).to(tl.int64) * kv_stride + slot * slot_stride
        tl.store(target + dims, first, mask=inside)
        tl.store(target + HEAD_DIM // 2 + dims, second, mask=inside)


@kernel
def activate(
    gate_up, out, alpha, limit,
    WIDTH: tl.constexpr, PLAIN: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The activation of an MLP row: act(gate) * up of a row [gate, up], or act of the whole row if PLAIN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * (WIDTH if PLAIN else 2 * WIDTH) + columns
    gate = tl.load(source, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    steep = wide
    if GELU:
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # twice the tanh's argument
    if CLAMPED:
        wide = tl.minimum(wide, limit)
        steep = wide * alpha
    turned = wide / (1.0 + tl.exp(tl.minimum(-steep, 80.0)))
    if not PLAIN:
        up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            turned = turned * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
        else:
            turned = turned.to(gate.dtype).to(tl.float32) * up
    tl.store(out + row * WIDTH + columns, turned.to(gate.dtype), mask=inside)


@kernel
def one_gemm(
    x, weight, bias, out, rows, outputs,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """x @ weight.T + bias; each sum runs over the inputs in ascending order, whatever the tile.

    Tiles with the same weights are consecutive, so that the weights are read from memory once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_at, weight_at = x + row.to(tl.int64) * WIDTH, weight + column.to(tl.int64) * WIDTH
    acc = sum_products(x_at, weight_at, row < rows, column < outputs, WIDTH, ROWS, OUTPUTS, INPUTS)
    if BIASED:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    out_at = out + row[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@kernel
def sum_products(
    x_at, weight_at, is_row, is_output,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The products of the rows at `x_at` with the weights at `weight_at`, summed over the inputs in ascending order."""
    term = tl.arange(0, INPUTS)
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, WIDTH, INPUTS):
        here = start + term < WIDTH
        a = tl.load(x_at[:, None] + (start + term)[None, :], mask=is_row[:, None] & here[None, :], other=0.0)
        b = tl.load(weight_at[None, :] + (start + term)[:, None], mask=is_output[None, :] & here[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
