"""Block drafters: their format, drafter and training."""
