"""GGUF: the files of llama.cpp, read as checkpoints."""
