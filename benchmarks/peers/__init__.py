"""The same checkpoints and prompts through forerun and through other engines, alternating in one run.

    python -m benchmarks.peers [--quick]

Peers: Hugging Face transformers, llama.cpp, OpenVINO GenAI, vLLM and SGLang for CPUs. Each lives in an environment of
its own below `build/peers`, made at first use; each runs as a worker process that is stopped while another computes.
What cannot be installed, built, exported or run is reported in the table with the last lines of its error, and the
others go on.
"""
