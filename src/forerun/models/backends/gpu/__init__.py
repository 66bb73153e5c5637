"""The GPU backend: passes of fixed shape, captured as CUDA graphs, with Triton kernels."""
