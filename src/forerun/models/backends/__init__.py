"""Backends, which compute layers behind one protocol: compiled kernels or torch's operators on CPUs, and GPUs."""
