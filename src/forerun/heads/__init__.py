"""Trained heads that draft on a target's states: a folder for each kind, and what the kinds share."""
