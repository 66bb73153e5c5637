"""MTP modules: their format, drafter and training."""
