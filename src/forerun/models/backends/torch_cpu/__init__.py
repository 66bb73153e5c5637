"""The CPU backend of torch's operators: the reference."""
