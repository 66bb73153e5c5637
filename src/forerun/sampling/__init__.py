"""Sampling: turns logits into a law, and a law into tokens, with noise that is a function of seed and position."""
