"""On a GPU: passes of fixed shape, captured as graphs, with kernels by Triton."""
