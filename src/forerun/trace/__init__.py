"""Trace: the rounds of one answer, with every draft token, its probabilities, and whether it was accepted."""
