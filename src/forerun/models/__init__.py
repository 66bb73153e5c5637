"""Models: the meaning of a checkpoint's config.json, its weights, and the decoder that computes with them."""
