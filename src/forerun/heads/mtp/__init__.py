"""MTP modules: their format, network, drafter and training."""
