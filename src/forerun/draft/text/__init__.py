"""Drafters that copy: from the text itself, or from past answers."""
