"""Quantized checkpoints in Hugging Face folders: the fields of config.json, and the layouts of their tensors."""
