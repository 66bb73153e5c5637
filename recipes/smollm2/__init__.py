"""The recipe of the drafter for SmolLM2-135M-Instruct."""
