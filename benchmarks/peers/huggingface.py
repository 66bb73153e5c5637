"""Hugging Face transformers: plain generation, assisted generation with the draft model, prompt lookup; bfloat16.

This file decides which packages are installed and which options a mode has. Depths are fixed, as in the other engines;
the library's default varies them with a confidence threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.place import TORCH, Peer, Place
from benchmarks.peers.protocol import Answer, Mode, Service, Setup, Stopwatch, serve
from typing_extensions import override


class Transformers(Peer):
    """Reads the checkpoints without conversion, and dequantizes GGUF files."""

    name = "transformers"
    module = "benchmarks.peers.huggingface"

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Install the library."""
        place.install([TORCH], [TORCH, "transformers", "gguf", "accelerate"])  # the last two read GGUF files


def load(setup: Setup) -> Service:
    """Load the models, which all modes share."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Watching(BaseStreamer):
        """Passes the number of tokens to a stopwatch; the first call contains the prompt and is skipped."""

        def __init__(self, watch: Stopwatch) -> None:
            self.watch = watch
            self.prompt_seen = False

        @override
        def put(self, value: torch.Tensor) -> None:
            if self.prompt_seen:
                self.watch.emitted(value.numel())
            self.prompt_seen = True

        @override
        def end(self) -> None:
            """Do nothing: no tokens are buffered."""

    torch.set_num_threads(setup.threads)
    models = []
    for path in (Path(each) for each in (setup.target, setup.draft) if each):
        file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if file else path
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **file)
        models.append(model.to(setup.device).eval())
        models[-1].generation_config.eos_token_id = None  # answers continue after the end-of-sequence token
    target, draft = models[0], models[-1]
    if setup.draft:
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        options: dict[str, Any] = {}
        if mode.drafter == "model":
            draft.generation_config.num_assistant_tokens = mode.depth
            options["assistant_model"] = draft
        elif mode.drafter == "ngram":
            options["prompt_lookup_num_tokens"] = mode.depth
        watch = Stopwatch()
        prompt = torch.tensor([prompt_ids], device=setup.device)
        with torch.inference_mode():
            text = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=num_tokens,
                streamer=Watching(watch),
                **options,
            )
        return watch.answer(text[0, len(prompt_ids) :].tolist())

    return Service({"transformers": transformers.__version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    serve(load)
