"""Medusa heads: their format, drafter and training."""
