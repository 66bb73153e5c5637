"""Keys and values: which blocks a sequence holds (blocks), the tensors they live in (paged), how much fits (plan)."""
