"""Draft models of other vocabularies, and the plan of all draft models."""
