"""The engine: one round (`engine.py`), who takes part in it, and what happens around it."""
