"""The demo: compares plain and speculative decoding side by side on this machine."""
