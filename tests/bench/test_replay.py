"""A replay emits the recorded tokens whatever is drafted, and its passes leave the right rows in the caches."""

import random
from functools import cache, partial

import pytest
import torch

from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.draft.model.model import ModelDrafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.request import Request
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.sampling.recorded import Recorded
from kit.checkpoints import DATA
from kit.oracles import Oracle
from law.fuzz import rows_of

VOCAB = 512
TEXTS = 4
DRAFTERS = ["none", "ngram", "model", "oracle"]


@cache
def weights(name: str) -> Runner:
    return Blueprint.of(str(DATA / name), dtype="float32").load(64)


def runner() -> Runner:
    return Runner.of(weights("stories260k").decoder, 2048, 16)


def edited(seed: int) -> tuple[list[int], list[int]]:
    """A random text, and the same with one in twelve tokens changed."""
    rng = random.Random(seed)
    old = [rng.randrange(3, VOCAB) for _ in range(40 + seed)]
    return [1, *old], [rng.randrange(3, VOCAB) if rng.random() < 1 / 12 else token for token in old]


def drafter(name: str) -> Drafter | None:
    if name == "model":
        return ModelDrafter(Runner.of(weights("stories280k").decoder, 2048, 16), VOCAB)
    return {"none": None, "ngram": NgramDrafter(), "oracle": Oracle(errs=lambda place: place % 5 == 3)}[name]


def replaying(name: str, speculation: Speculation, temperature: float, batch: int) -> tuple[Engine, list[Sequence]]:
    """An engine with the edited texts submitted, to be replayed."""
    texts = dict[int, list[int]]()
    engine = Engine(runner(), drafter(name), options=EngineOptions(batch, 32), draws=partial(Recorded, texts=texts))
    requests = RequestChecker(None, VOCAB, 128, eos_ids=(2,), default=speculation)
    sequences = []
    for seed in range(TEXTS):
        prompt, answer = edited(seed)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=len(answer), ignore_eos=True)
        (sequence,) = requests.sequences(Request.of(prompt, params))
        texts[sequence.id] = [*prompt, *answer]
        if isinstance(engine.drafter, Oracle):
            engine.drafter.answers.setdefault((tuple(prompt), 0), []).append((sequence.params, answer))
        engine.submit(sequence)
        sequences.append(sequence)
    return engine, sequences


@pytest.mark.short("0.0-1-model-*depth=8*", "0.9-3-oracle-*width=2*")
@pytest.mark.parametrize(
    ("name", "speculation"),
    [("none", Speculation(3))]
    + [(n, w) for n in DRAFTERS[1:] for w in (*map(Speculation, (0, 1, 3, 8)), Speculation(3, 2))],
    ids=str,
)
@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.9, 3)])
def test_the_emitted_tokens_are_the_recorded_ones(
    name: str, speculation: Speculation, temperature: float, batch: int
) -> None:
    engine, sequences = replaying(name, speculation, temperature, batch)
    while engine.has_work:
        engine.step()
    assert [s.tokens for s in sequences] == [[*p, *a] for p, a in map(edited, range(TEXTS))]
    if name in ("ngram", "oracle") and speculation.depth >= 2:
        assert engine.stats.tokens_per_round is not None
        assert engine.stats.tokens_per_round > 1.5  # n-grams draft edits of a text well, the oracle four tokens of five
    assert (engine.stats.num_drafted > 0) == (name != "none" and speculation.depth > 0)


@pytest.mark.short("*width=1*-model", "*width=2*-ngram")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("speculation", [Speculation(4), Speculation(3, 2)], ids=str)
def test_the_cache_holds_the_rows_of_the_text_read_at_once(name: str, speculation: Speculation) -> None:
    engine, sequences = replaying(name, speculation, 0.0, TEXTS)
    while all(s.num_output < 20 for s in sequences) or any(s.num_read < s.num_prompt for s in sequences):
        engine.step()
    for sequence in sequences:
        plain = runner()
        plain.read([Read(0, sequence.tokens[: sequence.num_read])])
        plain.keep([0], [range(sequence.num_read)])
        assert engine.runner.cache.length(sequence.id) == sequence.num_read
        assert torch.equal(rows_of(engine.runner, sequence.id), rows_of(plain, 0))


def test_only_recorded_texts_are_replayed_and_only_to_their_end() -> None:
    rows = [RowSampling(i, SamplingParams(), 7 + i, 0, [1, 5, 6], 1, (2,)) for i in range(2)]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    plain_draws = Draws(rows, VOCAB)
    for length, has_next in ((4, True), (3, False), (0, False)):
        text = [1, 5, 6, 9][:length]
        drawn = Recorded(rows, VOCAB, {0: text}).draw(logits, plain_draws.roots())
        expected = plain_draws.draw(logits, plain_draws.roots())
        assert drawn[1] == expected[1]
        assert drawn[0] == (9 if has_next else expected[0])
