"""Early exit: its drafter, and the adapters for it: their format and training."""
