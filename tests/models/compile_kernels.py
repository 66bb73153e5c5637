"""Compiles every kernel for an H100, which needs no GPU: what the interpreter runs must also be accepted as a kernel.

A program of its own, since the interpreter takes the kernels' place in a process where it is switched on.
"""

from itertools import product

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.models.backends.gpu import triton_kernels as k
from forerun.models.backends.gpu.backend import SMALLEST, TILES

HOPPER = GPUTarget("cuda", 90, 32)
LLAMA_8B = {"HEADS": 32, "HEAD_DIM": 128}
KEYS = {"GROUP": 4, "TILE": 32, "QUERIES": 8, "BLOCK_SIZE": 64, "BLOCK_KEYS": k.BLOCK_KEYS}
WHOLE = {"num_blocks", "num_splits", "workers", "window", "first_kv_head", "first_head", "kv_stride",
         "slot_stride", "rows", "outputs", "query_turn", "key_turn"}  # fmt: skip
REAL = {"scale", "cap", "eps", "alpha", "limit"}
TABLES = {"tables", "positions", "prefixes", "paths", "homes", "firsts", "counts", "shared", "slots"}
FLOATS = {"largest", "total", "cos", "sin"}
WITHOUT_PRODUCTS = {"add_norm", "rotate_store", "activate", "join_splits"}


MOST_SHARED = 232_448  # bytes that a program may have on an H100


def check(function, dtype: str, sizes: dict[str, int] | None = None, **constants: object) -> None:
    """Compile one variant, down to machine code. `sizes`: its warps and stages."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in WHOLE:
            return "i32"
        if name in REAL:
            return "fp32"
        if name in TABLES:
            return "*i32"
        partial = name == "mixed" and function.__name__ in ("attend_splits", "join_splits")
        return "*fp32" if name in FLOATS or partial else f"*{dtype}"

    signature = {name: kind(name) for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    made = compile_kernel(source, target=HOPPER, options=k.OPTIONS | (sizes or {}))
    assert made.metadata.shared <= MOST_SHARED, function.__name__
    assert made.asm["cubin"], function.__name__
    if function.__name__ in WITHOUT_PRODUCTS:
        assert "fma.rn" not in made.asm["ptx"], f"{function.__name__}: a product and a sum were made one"


def main() -> None:
    for paths, windowed, head_dim in ((0, False, 128), (16, True, 128), (16, True, 256)):
        shape = {"HEADS": 32, "HEAD_DIM": head_dim, "PART_HEADS": 32, "WINDOWED": windowed, "SPLIT": 256}
        check(k.attend_splits, "bf16", **shape, **KEYS, WIDTH=head_dim, PATHS=paths, CAPPED=windowed)
        check(k.join_splits, "bf16", **shape, WIDTH=head_dim, SINKS=windowed)
    for dtype in ("bf16", "fp32"):
        for extra, other in product((True, False), (True, False)):
            check(k.add_norm, dtype, HIDDEN=4096, WIDTH=4096, ADDS=extra, DELTA_NORMS=other, NORMS=extra or other)
            check(k.rotate_store, dtype, **LLAMA_8B, KV_HEADS=8, HALF=64, NORMS=extra, JOINT=other)
            for clamped in (True, False):
                check(k.activate, dtype, WIDTH=14336, BLOCK=1024, PLAIN=extra, GELU=other, CLAMPED=clamped)
        for tile in TILES if dtype == "bf16" else (SMALLEST,):
            sizes = {"num_warps": tile.warps, "num_stages": tile.stages}
            check(k.one_gemm, dtype, sizes, WIDTH=4096, BIASED=True, ROWS=tile.rows, OUTPUTS=tile.outputs,
                  INPUTS=tile.inputs)  # fmt: skip


if __name__ == "__main__":
    main()
