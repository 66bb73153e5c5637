"""Backends, which compute layers, behind one protocol: compiled kernels and torch's operators on CPUs, and a GPU."""
