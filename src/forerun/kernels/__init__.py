"""The C++ kernels: their sources, their compilation at first use, and the Python functions that a round calls."""
