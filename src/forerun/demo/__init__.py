"""The demo: prompts answered plain and drafted, side by side, and what that shows on this machine."""
