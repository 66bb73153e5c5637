"""Spec-Bench on a real model: 480 questions in 13 categories, plain decoding and every drafter by turns.

    python -m benchmarks.spec_bench --model MODEL.gguf --questions question.jsonl [--prompts-per-category 5] [--peers]

Each mode answers the same tokens after the same prompts, one beside the other, and another one begins each time. Beside
them stand, if asked for, llama.cpp on the same file and transformers on its unpacked weights.
"""
