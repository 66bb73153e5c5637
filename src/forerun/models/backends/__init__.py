"""What computes: a protocol, and its three sides: torch's operators on a CPU, compiled kernels, a GPU."""
