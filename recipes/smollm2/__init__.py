"""How the drafter for SmolLM2-135M-Instruct is made."""
