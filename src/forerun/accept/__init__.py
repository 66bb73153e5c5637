"""③ Accept: emits the tokens that the target sampled itself, and ends a sequence where plain decoding would end it."""
