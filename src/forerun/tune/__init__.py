"""Finds out which drafter helps on a user's own model, machine and prompts, how deep, and at what memory."""
