"""Drafters that copy earlier tokens: from the text itself, or from past answers."""
