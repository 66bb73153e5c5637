"""Sampling: from logits to a law, from a law to tokens, with noise that is a function of position and seed."""
