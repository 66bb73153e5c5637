"""Sampling: turns logits into a law, and a law into tokens; the noise is a function of seed and position."""
