"""Measures what speculation brings on a user's own model, machine and text."""
