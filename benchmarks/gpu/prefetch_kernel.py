"""The kernel that asks for memory to come into the L2 cache, by an instruction of compute capability 9.0."""

import triton
import triton.language as tl


@triton.jit
def prefetch(address, count, stride, size, LANES: tl.constexpr):
    """Ask for `count` pieces of `size` bytes, a multiple of 16, that begin every `stride` bytes; wait for none."""
    piece = tl.minimum(tl.program_id(0) * LANES + tl.arange(0, LANES), count - 1)
    begin = address + piece.to(tl.int64) * stride
    sizes = tl.full((LANES,), 0, tl.int32) + size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [begin, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
