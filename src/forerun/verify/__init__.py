"""② Verify: which guesses the target accepts, and the token that it draws after them. Pure functions of tensors."""
