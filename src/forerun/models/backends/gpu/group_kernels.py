"""Triton kernel: a matrix product with group-quantized weights, which are converted to bfloat16 in registers.

This file decides how 4-bit and 8-bit numbers become operands of tensor cores. Each of them is exact in bfloat16, so
nothing is rounded before the sum: the products of a group are summed in float32, inputs in ascending order, and the
group's sum times its scale is added to the sums of earlier groups. Groups are distributed over a few slices with
accumulators of their own, so that several warps work at once. The bits of a row depend on that row alone.

The scales of a chunk's groups are adjacent and loaded four bytes at a time, since only such loads are asynchronous:
waiting for each scale took as long as all other work.
"""

from __future__ import annotations

import triton.language as tl

from forerun.models.backends.gpu.triton_kernels import kernel

INT8, E4M3, INT4, UINT4, E2M1 = (tl.constexpr(i) for i in range(5))  # from INT4 on two numbers lie in a byte


def ptx(outputs: int, pair: str, times: int, plus: int | None) -> tl.constexpr:
    """PTX instructions that convert four bytes to pairs of bfloat16.

    Two bytes are placed in the halves of `t`; the instructions `pair` make numbers of them (and of `w`, if they use
    it); the result is `t * times + plus`, or `t * times + w` without `plus`. With four `outputs` the bytes hold 4-bit
    numbers: the first two outputs are their lower halves.
    """
    code = ["{ .reg .b32 t, v, w, times, plus;", f"mov.b32 times, {times:#x}; mov.b32 plus, {plus or 0:#x};"]
    for i in range(outputs):
        source = f"${outputs}" if i < 2 else "v"
        code += [f"shr.u32 v, ${outputs}, 4;"] if i == 2 else []
        code += [f"prmt.b32 t, {source}, 0, {(0x4140, 0x4342)[i % 2]:#x};", pair]
        code += [f"fma.rn.bf16x2 ${i}, t, times, {'w' if plus is None else 'plus'};"]
    return tl.constexpr("\n".join([*code, "}"]))


# Integers are written into the low mantissa bits of 128, which is subtracted again. Floating-point codes are placed as
# small bfloat16 numbers and multiplied by the power of two that corrects the exponent; adding -0 keeps a zero's sign.
LAST_BITS = "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;"
INT4_PTX, UINT4_PTX = (ptx(4, LAST_BITS, 0x3F803F80, middle) for middle in (0xC308C308, 0xC300C300))
INT8_PTX = ptx(
    2,
    "lop3.b32 w, t, 0x00800080, 0xC300C300, 0xEA; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;",
    0x3F803F80,
    None,
)
FLOAT = "shl.b32 w, t, {sign}; shl.b32 t, t, {size}; and.b32 t, t, {mask}; lop3.b32 t, w, 0x80008000, t, 0xEA;"
E4M3_PTX = ptx(2, FLOAT.format(sign=8, size=4, mask="0x07F007F0"), 0x7B807B80, 0x80008000)
E2M1_PTX = ptx(4, FLOAT.format(sign=12, size=6, mask="0x01C001C0"), 0x7E807E80, 0x80008000)


@kernel
def group_gemm(
    x, numbers, scales, least, bias, out, rows, outputs,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr, BIASED: tl.constexpr,
    PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T + bias; a program computes ROWS x OUTPUTS of it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_at = x + tl.program_id(0).to(tl.int64) * (ROWS * WIDTH) + tl.arange(0, ROWS) * WIDTH
    total = sum_groups(
        x_at, row < rows, numbers, scales, least, bias, 0, tl.program_id(1) * OUTPUTS, outputs,
        WIDTH, CHUNKS, KIND, BYTES, PARTS, SLICES, AT_ONCE, SCALED, LEAST, BIASED, PTX, ROWS, OUTPUTS, STAGES,
    )  # fmt: skip
    out_at = out + row[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])


@kernel
def sum_groups(
    x_at, row_here, numbers, scales, least, bias, before, first_column, outputs,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr, BIASED: tl.constexpr,
    PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The rows that begin at `x_at` times OUTPUTS columns of a layer's weights: CHUNKS chunks of BYTES bytes of each of
    its `outputs`, chunk after chunk, after `before` outputs of other experts. Offsets of lanes are 32-bit, which saves
    registers.

    A chunk of 8-bit numbers is one group, of 4-bit numbers two: the lower halves of its bytes, then the upper ones. Not
    SCALED: an output has one scale, for all its inputs. With LEAST each group has a lowest value too.

    Every SLICES-th chunk belongs to the same slice, and slices are added in pairs. AT_ONCE of them, all or half, are
    summed at the same time, each by its own warp.
    """
    byte, lane, column = tl.arange(0, BYTES), tl.arange(0, OUTPUTS), first_column + tl.arange(0, OUTPUTS)
    first_numbers = numbers + (tl.cast(before, tl.int64) * CHUNKS + first_column) * BYTES
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    row_in, column_in = row_here[None, :, None], (column < outputs)[None, None, :]
    for turn in tl.static_range(SLICES // AT_ONCE):
        piece = (turn * AT_ONCE + tl.arange(0, AT_ONCE))[:, None, None]
        first_input = piece * (HALVES * BYTES) + byte[None, None, :]
        inputs_at = x_at[None, :, None] + first_input
        numbers_at = lane[None, None, :] * BYTES + byte[None, :, None] + piece * (outputs * BYTES)
        groups_at = column[None, None, :] + piece * outputs
        acc = tl.zeros((AT_ONCE, ROWS, OUTPUTS), tl.float32)
        for step in tl.range(0, (CHUNKS + SLICES * PARTS - 1) // (SLICES * PARTS), num_stages=STAGES):
            for part in tl.static_range(PARTS):
                chunk = (step * PARTS + part) * SLICES
                here = (chunk + piece < CHUNKS) & column_in
                packed = tl.load(first_numbers + chunk.to(tl.int64) * outputs * BYTES + numbers_at, mask=here, other=0)
                weights = widen(packed, KIND, PTX, x_at.dtype.element_ty)
                group = before * CHUNKS + (groups_at + chunk * outputs)
                scale = load_groups(scales, group, here, HALVES) if SCALED else weights
                low = load_groups(least, group, here, HALVES) if LEAST else weights
                for half in tl.static_range(HALVES):
                    start = (chunk * HALVES + half) * BYTES
                    a = tl.load(inputs_at + start, mask=row_in & (start + first_input < WIDTH), other=0.0)
                    acc = add_group(acc, a, weights[half], scale[half], low[half], SCALED, LEAST)
        some = add_slices(acc, AT_ONCE)
        if turn == 0:
            total = some
        else:
            total += some
    if not SCALED:
        total = total * tl.load(scales + (before + column), mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + (before + column), mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    return total


@kernel
def add_group(acc, a, weights, scale, low, SCALED: tl.constexpr, LEAST: tl.constexpr):
    """The accumulators plus the products of a group, times its scale and with its lowest value, if it has these."""
    if not SCALED:
        return tl.dot(a, weights, acc, input_precision="ieee")
    else:  # noqa: RET505
        sums = tl.dot(a, weights, input_precision="ieee")
        acc = tl.fma(sums, tl.broadcast_to(scale, acc.shape), acc)
        if LEAST:
            sums = tl.dot(a, tl.full(weights.shape, 1.0, a.dtype), input_precision="ieee")
            acc = tl.fma(sums, tl.broadcast_to(low, acc.shape), acc)
        return acc


@kernel
def load_groups(values, at, here, HALVES: tl.constexpr):
    """The scales (or lowest values) of a chunk's groups in float32: two of 16 bits in one load, or a load for each."""
    if values.dtype.element_ty == tl.float32:
        first = tl.load(values + at * HALVES, mask=here, other=0.0)
        second = first
        if HALVES == 2:
            second = tl.load(values + at * HALVES + 1, mask=here, other=0.0)
        return first, second
    pair = tl.load(values.to(tl.pointer_type(tl.int32)) + at, mask=here, other=0)
    if values.dtype.element_ty == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    first = (pair & 65535).to(tl.int16).to(tl.float16, bitcast=True)
    return first.to(tl.float32), (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@kernel
def add_slices(acc, SLICES: tl.constexpr):
    """The sum of the slices, a power of two, as a binary tree of neighbours."""
    parts = tl.permute(acc, (1, 2, 0))
    for halvings in tl.static_range(SLICES.bit_length() - 1):
        even, odd = tl.split(tl.reshape(parts, (acc.shape[1], acc.shape[2], SLICES >> (halvings + 1), 2)))
        parts = even + odd
    return tl.reshape(parts, (acc.shape[1], acc.shape[2]))


@kernel
def unpack_groups(
    numbers, scales, least, out, outputs, inputs,
    KIND: tl.constexpr, BYTES: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """The dequantized weights [outputs, inputs] in the dtype of `out`; a program does one chunk of some outputs."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    byte = tl.arange(0, BYTES)
    here = (column < outputs)[:, None]
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    packed = tl.load(numbers + (chunk * outputs + column[:, None]) * BYTES + byte[None, :], mask=here, other=0)
    weights = widen(packed, KIND, False, tl.float32)
    for half in tl.static_range(HALVES):
        group = (chunk * outputs + column) * HALVES + half if SCALED else column
        weight = weights[half] * tl.load(scales + group, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
        if LEAST:
            weight += tl.load(least + group, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
        at = (chunk * HALVES + half) * BYTES + byte
        place = out + column[:, None].to(tl.int64) * inputs + at[None, :]
        tl.store(place, weight.to(out.dtype.element_ty), mask=here & (at < inputs)[None, :])


@kernel
def widen(packed, KIND: tl.constexpr, PTX: tl.constexpr, dtype: tl.constexpr):
    """The numbers in these bytes, exact in `dtype`; of 4-bit numbers the lower halves, then the upper ones.

    With PTX four bytes are converted at once, to pairs of bfloat16.
    """
    if PTX:
        if KIND < INT4:
            code: tl.constexpr = INT8_PTX if KIND == INT8 else E4M3_PTX
            wide = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
            return wide, wide
        pairs: tl.constexpr = E2M1_PTX if KIND == E2M1 else INT4_PTX if KIND == INT4 else UINT4_PTX
        return tl.inline_asm_elementwise(
            pairs, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    code = packed.to(tl.int32) & 255
    if KIND == INT8:
        wide = tl.where(code > 127, code - 256, code).to(tl.float32)
        return wide.to(dtype), wide.to(dtype)
    if KIND == E4M3:
        wide = small_float(code, 7, 20, 1.329227995784916e36)
        return wide.to(dtype), wide.to(dtype)
    low, high = code & 15, code >> 4
    if KIND == E2M1:
        power = 8.507059173023462e37
        return small_float(low, 3, 22, power).to(dtype), small_float(high, 3, 22, power).to(dtype)
    middle = 8 if KIND == INT4 else 0
    return (low - middle).to(tl.float32).to(dtype), (high - middle).to(tl.float32).to(dtype)


@kernel
def small_float(code, SIGN: tl.constexpr, SHIFT: tl.constexpr, POWER: tl.constexpr):
    """The number with its sign at bit SIGN and exponent and mantissa below it; POWER corrects the exponent's bias."""
    size = ((code & ((1 << SIGN) - 1)) << SHIFT).to(tl.float32, bitcast=True) * POWER
    return tl.where((code >> SIGN) > 0, -size, size)
