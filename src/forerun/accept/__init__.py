"""③ Accept: keeps the tokens that the target drew itself, and ends sequences where plain decoding would end them."""
