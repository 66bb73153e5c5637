"""Measures the speed-up of speculation on a user's own model, machine and text."""
