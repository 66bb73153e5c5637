"""② Verify: which guesses the target keeps, and what it says after them. Pure functions of tensors."""
