"""Draft models of other vocabularies."""
