"""Text: tokenizers, tokens to text as they come, and chat templates."""
