"""Drafters that are models: their common part (`follower.py`), draft models, and the growth of draft trees."""
