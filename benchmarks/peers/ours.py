"""forerun itself as a worker, with this repository's source: every mode over the same weights.

This file decides which engine answers which mode.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.peers.place import ROOT, Place
from benchmarks.peers.protocol import MIX, Answer, Mode, Service, Setup, Stopwatch, serve


class Forerun:
    """Needs no environment but the one that asks."""

    name = "forerun"
    formats: Mapping[str, str] = {"16-bit": "bfloat16", "8-bit": "int8", "4-bit": "int4"}
    drafts = True
    module = "benchmarks.peers.ours"
    environment: Mapping[str, str] = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def make(self, place: Place, setup: Setup) -> None:
        """Nothing is to be made."""
        place.folder.mkdir(parents=True, exist_ok=True)

    def python(self, place: Place) -> str:
        """The interpreter that asks."""
        return sys.executable


def load(setup: Setup) -> Service:
    """Both models. Beside the engine that drafts with one of them: a plain one, one with n-grams, one with both."""
    import torch

    from forerun import LLM, SamplingParams, __version__
    from forerun.config import QUANTIZATIONS
    from forerun.demo.race import engine_beside
    from forerun.draft.base import Drafter
    from forerun.draft.many.mix import MixDrafter
    from forerun.draft.model.model import ModelDrafter
    from forerun.draft.text.ngram import NgramDrafter
    from forerun.request import Request

    llm = LLM(
        setup.target,
        f"model:{setup.draft}",
        dtype="bfloat16",
        quantize=setup.format if setup.format in QUANTIZATIONS else None,
        max_num_seqs=1,
        prefix_cache=False,  # repetitions ask the same prompts, and every engine has to read them each time
        threads=setup.threads,
    )
    engines = {"plain": engine_beside(llm, None), "model": llm.engine, "ngram": engine_beside(llm, NgramDrafter())}
    model = llm.engine.drafter
    assert isinstance(model, ModelDrafter), "the draft is a model"
    runner = type(model.runner).of(model.runner.decoder, llm.plan.cache_tokens)
    both: Sequence[Drafter] = [NgramDrafter(), ModelDrafter(runner, model.vocab_size, model.shared)]
    engines[MIX] = engine_beside(llm, MixDrafter(both, ("ngram", "model")))

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        engine = engines[mode.drafter]
        watch = Stopwatch()
        (sequence,) = llm.requests.sequences(Request.of(prompt_ids, params, mode.depth))
        engine.submit(sequence)
        while engine.has_work:
            watch.emitted(sum(len(delta.token_ids) for delta in engine.step()))
        return watch.answer(sequence.tokens[sequence.num_prompt :])

    return Service({"forerun": __version__, "torch": torch.__version__, "numbers": llm.format}, generate)


if __name__ == "__main__":
    serve(load)
