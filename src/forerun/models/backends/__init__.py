"""Backends, which compute layers, with one protocol: compiled kernels and torch's operators on CPUs, and GPUs."""
