"""Medusa heads: their format, network, drafter and training."""
