"""forerun as a worker, with the source of this repository; all modes share the target's weights.

This file decides which engine answers which mode. If the setup has a draft model, the modes are those of all engines.
Otherwise a mode is any drafter as `--draft` spells it, which is loaded at its first answer, as a user would load it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.peers.place import Peer, Place
from benchmarks.peers.protocol import MIX, Answer, Mode, Service, Setup, Stopwatch, serve
from benchmarks.processes import ROOT
from typing_extensions import override

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.engine.engine import Engine

FindEngine = Callable[[Mode], "tuple[LLM, Engine]"]


class Forerun(Peer):
    """Runs in the environment of the benchmark."""

    name = "forerun"
    formats: Mapping[str, str] = {"16-bit": "bfloat16", "8-bit": "int8", "4-bit": "int4"}
    module = "benchmarks.peers.ours"
    environment: Mapping[str, str] = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Create the folder of the place; nothing else is needed."""
        place.folder.mkdir(parents=True, exist_ok=True)

    @override
    def python(self, place: Place) -> str:
        """The interpreter of the benchmark."""
        return sys.executable


def load(setup: Setup) -> Service:
    """Load the models of the setup."""
    import torch

    from forerun import SamplingParams, __version__
    from forerun.bench.run import TimedEngine
    from forerun.request import Request

    find = fixed_modes(setup) if setup.draft else free_modes(setup)
    numbers = find(Mode())[0].format
    tenants = itertools.count()

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        params = SamplingParams(temperature=setup.temperature, max_tokens=num_tokens, ignore_eos=True, seed=0)
        llm, engine = find(mode)
        watch = Stopwatch()
        speculation, tenant = (mode.depth or None), str(next(tenants))  # so that no drafter has seen earlier answers
        sequences = llm.requests.sequences(Request.of(prompt_ids, params, speculation, tenant))
        timed_engine = TimedEngine(engine, sequences)
        while engine.has_work:
            watch.emitted(sum(len(delta.token_ids) for delta in timed_engine.step(watch.clock).deltas))
        return watch.answer(sequences[0].tokens[sequences[0].num_prompt :])

    return Service({"forerun": __version__, "torch": torch.__version__, "numbers": numbers}, generate)


def free_modes(setup: Setup) -> FindEngine:
    """A function that finds the engine of a mode, with a separate LLM for every drafter."""
    from forerun import LLM

    llms: dict[str, LLM] = {}

    def find(mode: Mode) -> tuple[LLM, Engine]:
        draft = mode.drafter if mode.spec else None
        if str(draft) not in llms:
            llms[str(draft)] = LLM(
                setup.target,
                draft,
                max_model_len=setup.context_tokens,
                max_num_seqs=1,
                prefix_cache=False,
                threads=setup.threads,
                use_tqdm_on_load=False,
            )
        return llms[str(draft)], llms[str(draft)].engine

    return find


def fixed_modes(setup: Setup) -> FindEngine:
    """A function that finds the engine of a mode: plain, draft model, n-grams, or both drafters, on one target."""
    from forerun import LLM
    from forerun.config import QUANTIZATIONS
    from forerun.demo.race import second_engine
    from forerun.draft.base import Drafter
    from forerun.draft.many.mix import MixDrafter
    from forerun.draft.model.model import ModelDrafter
    from forerun.draft.text.ngram import NgramDrafter

    llm = LLM(
        setup.target,
        f"model:{setup.draft}",
        dtype="bfloat16",
        quantize=setup.format if setup.format in QUANTIZATIONS else None,
        max_num_seqs=1,
        prefix_cache=False,  # prompts are repeated, and every engine has to prefill them each time
        threads=setup.threads,
    )
    engines = {"plain": second_engine(llm, None), "model": llm.engine, "ngram": second_engine(llm, NgramDrafter())}
    model = llm.engine.drafter
    assert isinstance(model, ModelDrafter), "the draft is a model"
    runner = type(model.runner).of(model.runner.decoder, llm.plan.cache_tokens)
    both: Sequence[Drafter] = [NgramDrafter(), ModelDrafter(runner, model.vocab_size, model.shared)]
    engines[MIX] = second_engine(llm, MixDrafter(both, ("ngram", "model")))

    return lambda mode: (llm, engines[mode.drafter])


if __name__ == "__main__":
    serve(load)
