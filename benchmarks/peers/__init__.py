"""Compares forerun with other engines on the same checkpoints and prompts, alternating in one run.

    python -m benchmarks.peers [--quick]

The other engines ("peers") are Hugging Face transformers, llama.cpp, OpenVINO GenAI, vLLM and SGLang for CPUs. Each has
its own environment below `build/peers`, which is created at first use, and runs as a worker process that is stopped
while another one computes. If an engine cannot be installed, built, exported or run, the table has the last lines of
its error, and the others continue.
"""
