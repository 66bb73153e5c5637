"""Spec-Bench on a real model: 480 questions in 13 categories, with alternating plain decoding and drafters.

    python -m benchmarks.spec_bench --model MODEL.gguf --questions question.jsonl [--prompts-per-category 5] [--peers]

All modes generate answers of the same lengths after the same prompts; they alternate prompt by prompt, and each prompt
begins with another mode. `--peers` adds llama.cpp on the same file and transformers on its dequantized weights.
"""
