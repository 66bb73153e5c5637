"""The engine: the round (plan, draft, verify, accept), scheduling, and how far to draft."""
