"""The demo: prompts answered with plain and with drafted decoding, side by side, on this machine."""
