"""OpenVINO GenAI: its LLM pipeline plain, with the draft model, and with prompt lookup; fp16 and int8 weights.

This file decides what is installed, how models are exported and which pipeline a mode is. Exports go through
optimum-intel, the documented way. A pipeline is made when its drafter is first asked for; depth is an option of each
call. Times are taken as a streamer is given tokens: its own metrics note them all at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.peers.place import TORCH, Peer, Place
from benchmarks.peers.protocol import Answer, Mode, Service, Setup, Stopwatch, serve

MATCHED_TOKENS = 3  # the longest n-gram of its prompt lookup, as in its own samples


class OpenVino(Peer):
    """Reads its own format, exported by optimum-intel with tokenizer and detokenizer beside it."""

    name = "openvino"
    formats: Mapping[str, str] = {"16-bit": "fp16", "8-bit": "int8"}
    module = "benchmarks.peers.openvino"
    environment: Mapping[str, str] = {"OPENVINO_LOG_LEVEL": "0"}

    def make(self, place: Place, setup: Setup) -> None:
        """Install it and export both models in the setup's format."""
        place.install([TORCH], [TORCH, "openvino-genai", "openvino-tokenizers", "optimum-intel"])
        # optimum-intel brings a torchvision that may not be of this torch's build; text models need none
        place.uninstall("torchvision")
        for folder in (setup.target, setup.draft):
            export = export_of(place.folder, folder, setup.format)
            command = [str(place.folder / "venv" / "bin" / "optimum-cli"), "export", "openvino", "--model", folder]
            command += ["--task", "text-generation-with-past", "--weight-format", setup.format, str(export)]
            place.once(export.name, folder, partial(place.run, f"exporting {export.name}", command))


def export_of(place: Path, checkpoint: str, number_format: str) -> Path:
    """Where a checkpoint's export is."""
    return place / f"{Path(checkpoint).name}-{number_format}"


def load(setup: Setup) -> Service:
    """No pipeline yet: one for each drafter comes when it is first asked for."""
    import numpy
    import openvino
    import openvino_genai

    place = Path(setup.place)
    target, draft = (str(export_of(place, f, setup.format)) for f in (setup.target, setup.draft))
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
    scheduling = openvino_genai.SchedulerConfig()  # as LLMPipeline makes it on CPUs, but without its prefix cache
    scheduling.max_num_batched_tokens, scheduling.enable_prefix_caching = sys.maxsize, False
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # it would still choose bfloat16 by the processor, and fail
        options["INFERENCE_PRECISION_HINT"] = "f32"

    class Watching(openvino_genai.StreamerBase):  # type: ignore[misc]
        """Tells a stopwatch of tokens, which come one by one or several at once."""

        def __init__(self, watch: Stopwatch) -> None:
            super().__init__()
            self.watch = watch

        def write(self, token: int | Sequence[int]) -> Any:
            self.watch.emitted(1 if isinstance(token, int) else len(token))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    @cache
    def pipeline(drafter: str) -> Any:
        if drafter == "model":
            guide = openvino_genai.draft_model(draft, "CPU", **options)
            return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduling, draft_model=guide, **options)
        if drafter == "ngram":
            return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduling, prompt_lookup=True, **options)
        return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduling, **options)

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        if mode.depth:
            config.num_assistant_tokens = mode.depth
        if mode.drafter == "ngram":
            config.max_ngram_size = MATCHED_TOKENS
        ids = openvino.Tensor(numpy.array([prompt_ids], dtype=numpy.int64))
        mask = openvino.Tensor(numpy.ones((1, len(prompt_ids)), dtype=numpy.int64))
        guided = pipeline(mode.drafter)
        watch = Stopwatch()
        answer = guided.generate(openvino_genai.TokenizedInputs(ids, mask), config, Watching(watch))
        return watch.answer(answer.tokens[0])

    numbers = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__, "computes in": numbers}
    return Service(versions, generate)


if __name__ == "__main__":
    serve(load)
