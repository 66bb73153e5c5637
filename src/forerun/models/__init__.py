"""Models: what a checkpoint's config.json means, its weights, and the decoder that computes with them."""
