"""Trace: the rounds of one answer, with every drafted token, its probabilities, and whether it was accepted."""
