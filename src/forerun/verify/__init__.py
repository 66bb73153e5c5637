"""② Verify: which draft tokens are accepted, and the token that is sampled after them. Pure functions of tensors."""
