"""By torch's operators, on a CPU: the reference."""
