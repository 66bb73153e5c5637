"""EAGLE layers: their format, drafter and training."""
