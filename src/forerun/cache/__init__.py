"""The KV cache: the blocks of each sequence (blocks), their tensors (paged), and how many tokens fit (plan)."""
