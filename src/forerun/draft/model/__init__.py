"""Drafters that are models: what they share (`follower.py`), each kind, and how their guesses grow."""
