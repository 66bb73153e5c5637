"""Training of drafters by distillation on the target's answers, with evaluation on held-out answers."""
