"""Block drafters: their format, network, drafter and training."""
