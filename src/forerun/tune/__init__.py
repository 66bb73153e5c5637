"""Finds the best drafter and depth for a user's own model, machine and prompts."""
