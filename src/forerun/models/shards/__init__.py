"""Tensor parallelism: one model whose layers several processes share, on one machine or on more."""
