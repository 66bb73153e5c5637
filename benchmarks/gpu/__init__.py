"""What a GPU does: its tests, kernels, passes and tokens, in parts, for a machine on which minutes count."""
