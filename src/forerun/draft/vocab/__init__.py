"""Draft models with another tokenizer than the target's, and the plan of all draft models."""
