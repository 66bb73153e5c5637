"""Trace: one prompt, round by round: what was guessed, how likely the target found it, and what was accepted."""
