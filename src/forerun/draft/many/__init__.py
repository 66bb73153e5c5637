"""Drafters made of others: cascades, and mixes."""
