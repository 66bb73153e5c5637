"""OpenVINO GenAI: its LLM pipeline plain, with the draft model, and with prompt lookup; fp16 and int8 weights.

This file decides which packages are installed, how models are exported and which pipeline a mode has. Models are
exported with optimum-intel, as documented. A pipeline is made at the first answer with its drafter; the depth is an
option of each call. Times are taken when a streamer receives tokens, because OpenVINO's metrics are known only at the
end.
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
from typing_extensions import override

MATCHED_TOKENS = 3  # the longest n-gram of its prompt lookup, as in OpenVINO's samples


class OpenVino(Peer):
    """Reads OpenVINO's format, which optimum-intel exports together with a tokenizer and a detokenizer."""

    name = "openvino"
    formats: Mapping[str, str] = {"16-bit": "fp16", "8-bit": "int8"}
    module = "benchmarks.peers.openvino"
    environment: Mapping[str, str] = {"OPENVINO_LOG_LEVEL": "0"}

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Install the packages and export both models in the setup's format."""
        place.install([TORCH], [TORCH, "openvino-genai", "openvino-tokenizers", "optimum-intel"])
        # optimum-intel installs a torchvision that may not match this torch; text models do not need it
        place.uninstall("torchvision")
        for folder in (setup.target, setup.draft):
            export = export_of(place.folder, folder, setup.format)
            command = [str(place.folder / "venv" / "bin" / "optimum-cli"), "export", "openvino", "--model", folder]
            command += ["--task", "text-generation-with-past", "--weight-format", setup.format, str(export)]
            place.once(export.name, folder, partial(place.run, f"exporting {export.name}", command))


def export_of(place: Path, checkpoint: str, number_format: str) -> Path:
    """The folder of a checkpoint's export."""
    return place / f"{Path(checkpoint).name}-{number_format}"


def load(setup: Setup) -> Service:
    """A service that makes the pipeline of each drafter at its first answer."""
    import numpy
    import openvino
    import openvino_genai

    place = Path(setup.place)
    target, draft = (str(export_of(place, f, setup.format)) for f in (setup.target, setup.draft))
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
    scheduling = openvino_genai.SchedulerConfig()  # as LLMPipeline makes it on CPUs, but without its prefix cache
    scheduling.max_num_batched_tokens, scheduling.enable_prefix_caching = sys.maxsize, False
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # OpenVINO would choose bfloat16 on this processor, and fail
        options["INFERENCE_PRECISION_HINT"] = "f32"

    class Watching(openvino_genai.StreamerBase):  # type: ignore[misc]
        """Passes the number of tokens to a stopwatch; they arrive one by one or several at once."""

        def __init__(self, watch: Stopwatch) -> None:
            super().__init__()
            self.watch = watch

        def write(self, token: int | Sequence[int]) -> Any:
            self.watch.emitted(1 if isinstance(token, int) else len(token))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing: no tokens are buffered."""

    @cache
    def pipeline(drafter: str) -> Any:
        if drafter == "model":
            model = openvino_genai.draft_model(draft, "CPU", **options)
            return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduling, draft_model=model, **options)
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
        loaded = pipeline(mode.drafter)  # before the time is measured
        watch = Stopwatch()
        answer = loaded.generate(openvino_genai.TokenizedInputs(ids, mask), config, Watching(watch))
        return watch.answer(answer.tokens[0])

    numbers = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__, "computes in": numbers}
    return Service(versions, generate)


if __name__ == "__main__":
    serve(load)
