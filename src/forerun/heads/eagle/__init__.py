"""EAGLE layers: their format, network, drafter and training."""
