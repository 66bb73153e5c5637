"""Traffic: requests sent to a running server at a known load, and what they took."""
