"""The engine: one round (`round.py`), who takes part in it, and what happens around it."""
