"""Engines over passes of fixed shape: the same tokens, and one synchronisation per round, which fetches the draft."""

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from forerun import LLM, Grammar, SamplingParams
from forerun.device import CPU, Placement
from forerun.draft.model.model import ModelDrafter
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.sampling.draws import Draws
from forerun.sampling.noise import gumbel
from forerun.sampling.params import LogitsProcessor
from forerun.sampling.winners import RoundNoise
from kit.assertions import tokens_of
from kit.card import PLACEMENT, imagined, submit
from kit.checkpoints import SMALL, TARGET

FIXED = Placement(torch.device("cpu"), fixed=True)
PROMPTS = ["Once upon a time", "The little dog", "One day, Tim", "Lily and her mom"]
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}


def make(target: Path, draft: str | None, placement: Placement = FIXED, **options: object) -> LLM:
    return LLM(str(target), draft, dtype="float32", device=placement, max_model_len=256, **options)  # type: ignore[arg-type]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1, seed=3, max_tokens=12),
    SamplingParams(temperature=0.8, seed=4, top_k=20, repetition_penalty=1.1, presence_penalty=0.2, max_tokens=12),
    SamplingParams(temperature=1.2, seed=5, top_p=0.9, max_tokens=12, n=2),
]


def test_requests_with_logits_processors_are_drafted_level_by_level() -> None:
    def no_e(text: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[list(range(0, 512, 7))] -= 2.0
        return logits

    processor: LogitsProcessor = no_e
    params = SamplingParams(temperature=0, max_tokens=20, logits_processors=(processor,))
    fixed, plain = make(TARGET, f"model:{SMALL}", speculation=4), make(TARGET, None, CPU)
    assert tokens_of(fixed.generate(PROMPTS, params)) == tokens_of(plain.generate(PROMPTS, params))
    assert fixed.stats.num_accepted > 0


@pytest.mark.full
def test_a_drafter_short_of_memory_changes_no_token() -> None:
    plain = make(TARGET, None, CPU)
    fixed = make(TARGET, f"model:{SMALL}", speculation=4)
    drafter = fixed.drafter
    assert isinstance(drafter, ModelDrafter)
    small = GraphRunner.of(drafter.runner.decoder, 96, block_size=8)  # not even two sequences' worth
    fixed.engine.drafter = ModelDrafter(small, drafter.vocab_size)
    assert tokens_of(fixed.generate(PROMPTS, PARAMS)) == tokens_of(plain.generate(PROMPTS, PARAMS))
    small.cache.check()


class Waits(TorchDispatchMode):
    """Counts operators for which the host would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_", "index_put") else []
        if name in WAITS or any(i is not None and i.dtype == torch.bool for i in indices):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts methods that copy numbers to the host; not numpy(), which refuses tensors of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @override
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("tolist", "item", "cpu", "__bool__", "__int__", "__index__", "__float__"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    found: list[str] = []
    with Reads() as reads, Waits() as waits:
        yield found
    found += reads.found + waits.found


@pytest.mark.short("coupled-sampled-model")
@pytest.mark.parametrize("drafter", ["model", "ngram", "early-exit:3", None])
@pytest.mark.parametrize("params", PARAMS[:3], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_one_synchronisation_per_round(
    monkeypatch: pytest.MonkeyPatch, drafter: str | None, params: SamplingParams, rule: str
) -> None:
    # What a device does: on CPUs a round's noise is kept in a dictionary, by keys that the host reads.
    monkeypatch.setattr(RoundNoise, "rows", lambda noise, keys: gumbel(keys, noise.vocab))
    draft = f"model:{SMALL}" if drafter == "model" else drafter
    llm = make(TARGET, draft, speculation=4, verification=rule)
    submit(llm, PROMPTS, params)
    rounds = 0
    while llm.engine.has_work:
        with counted() as found:
            llm.engine.step()
        runner = llm.engine.runner
        assert isinstance(runner, GraphRunner)
        begun = runner.ahead is not None  # then the event of the verdict is waited for, and nothing else
        assert found == ([] if begun else ["tolist"]), f"round {rounds}"
        rounds += 1
    assert rounds > 5
    if drafter:
        assert llm.stats.num_accepted > 0


EVERY = SamplingParams(
    temperature=0.9, seed=6, max_tokens=12, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1,
    frequency_penalty=0.2, logit_bias={403: -3.0}, bad_words=["the dog"], min_tokens=5,
)  # fmt: skip


@pytest.mark.short("logprobs", "every-model")
@pytest.mark.parametrize(
    ("drafter", "params", "most"),
    [
        (None, PARAMS[1], 8),  # of them 4 between the verdict and the pass that begins before the host has it
        ("model", PARAMS[1], 17),
        (None, PARAMS[2], 8),
        (None, EVERY, 8),
        (None, replace(EVERY, logprobs=3), 6),
        ("model", EVERY, 17),
    ],
    ids=["plain", "model", "penalised", "every", "logprobs", "every-model"],
)
def test_a_round_sends_few_operations_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch, drafter: str | None, params: SamplingParams, most: int
) -> None:
    """Each takes the host some microseconds; many would take longer than a small model's pass takes the GPU."""
    sent, waits = [], set()
    with imagined(monkeypatch) as seen, torch.inference_mode():
        llm = make(TARGET, f"model:{SMALL}" if drafter else None, PLACEMENT, speculation=4)
        submit(llm, PROMPTS, params)
        while llm.engine.has_work and len(sent) < 12:
            seen.clear()
            llm.engine.step()
            sent.append([*seen.sent])
            waits.add(tuple(seen.waits))
    assert statistics.median(map(len, sent)) <= most, sent[len(sent) // 2]
    assert waits <= {("tolist",), ()}, "a verdict that is sent to the host before a pass is waited for by its event"


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_log_probabilities_computed_in_a_graph_are_those_computed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """For drafted tokens, too; each row has the requested number, cut where a stop string cuts the answer."""
    grammar = Grammar.regex("[A-Z][a-z ,]*[.]")
    params = [
        replace(EVERY, logprobs=3), replace(PARAMS[1], logprobs=0, grammar=grammar), PARAMS[0],
        replace(PARAMS[0], logprobs=12, stop=("the", "and")),
    ]  # fmt: skip
    answers = []
    for judged in (True, False):
        if not judged:
            monkeypatch.setattr(GraphRunner, "judge", lambda *_: None)
        llm = make(TARGET, f"model:{SMALL}" if drafter == "model" else drafter, speculation=4)
        outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
        answers.append([(output.token_ids, output.logprobs) for output in outputs])
        assert llm.stats.num_accepted > 0
    assert answers[0] == answers[1]
    assert all(answer[1] for answer in (answers[0][i] for i in (0, 1, 3)))


def test_the_count_of_operations_detects_waits() -> None:
    with counted() as found:
        x = torch.ones(3)
        x.tolist(), x[x > 0], x.nonzero(), bool(x[0])
    assert len(found) >= 4


def test_a_wrong_declared_shape_of_an_unfetched_chain_is_harmless() -> None:
    """Whatever shape a drafter declares, the tokens are those of plain decoding."""
    from forerun.draft.base import Budget, Committed, Draft
    from forerun.draft.text.ngram import NgramDrafter
    from forerun.tree import DraftTree, HostTree

    dice = random.Random(0)

    class Liar(NgramDrafter):
        @override
        def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
            batch, columns = len(budgets), 4
            tokens = torch.tensor([[dice.randrange(-1, 512) for _ in range(columns)] for _ in range(batch)])
            tokens[:, 0] = draws.roots_tokens
            parents = torch.tensor([[-1, 0, dice.choice([0, 1]), dice.choice([1, 2])] for _ in range(batch)])
            counts = [dice.randrange(-1, 6) for _ in range(batch)]
            known = [HostTree.unseen(count) for count in counts]
            return Draft(DraftTree(tokens, parents, depth=3, known=known))

    plain = make(TARGET, None, CPU)
    liar = LLM(str(TARGET), Liar(), dtype="float32", device=FIXED, max_model_len=256)
    assert tokens_of(liar.generate(PROMPTS, PARAMS)) == tokens_of(plain.generate(PROMPTS, PARAMS))


@pytest.mark.full
def test_few_graphs_are_captured_for_answers_of_any_lengths() -> None:
    """Near its end an answer's depth falls, and a batch becomes smaller."""
    llm, dice = make(TARGET, f"model:{SMALL}", speculation=8), random.Random(0)
    assert isinstance(llm.drafter, ModelDrafter)
    target, drafter = llm.engine.runner, llm.drafter.runner
    assert isinstance(target, GraphRunner)
    assert isinstance(drafter, GraphRunner)
    for runner in (target, drafter):
        runner.graphs.enabled = True  # as on a GPU: tables are kept for the graphs that refer to them
    for _ in range(6):
        lengths = [dice.randint(5, 34) for _ in PROMPTS]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        llm.generate(PROMPTS, params)
    (graph,) = drafter.chain_graphs.values()
    assert {shape.depth for shape in graph.buffers} <= {8, 4, 2, 1}
    assert len(graph.buffers) <= 6
    for runner in (target, drafter):
        assert {shape.rows for shape, _ in runner.tables} <= {16, 32, 64}
    assert 0 < len(target.verdicts.tables) <= 3
