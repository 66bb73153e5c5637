"""Trace: one prompt, round by round. What was guessed, what the target thought of it, and what became of it."""
