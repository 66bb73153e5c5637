"""Tests and measures forerun on a GPU in separate parts, for a machine that is available for minutes only."""
