"""The round: plan, draft, verify, accept."""
