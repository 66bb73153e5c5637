"""Adapters for early exit: their format, network, drafter and training."""
