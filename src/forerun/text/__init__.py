"""Text: tokenizers, incremental conversion of tokens to text, and chat templates."""
