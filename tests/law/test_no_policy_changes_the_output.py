"""No policy of draft depth changes the output, not even one that looks at the draft tokens.

Under coupled verification the tokens are those of plain decoding; under `token` and `block` the law is. The engine
verifies a tree that a controller has changed as one without a law; a test shows that anything else is biased. Nor does
any drafter change the output at the requested depth.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from typing_extensions import override

from forerun.accept.outcome import Outcome
from forerun.cache.paged import Spare
from forerun.config import EngineOptions, Speculation, Verification
from forerun.control.controller import Controller, FixedDepth, Load
from forerun.draft.base import NO_DRAFT, Budget, Draft, Drafter, Judge, Outlook
from forerun.draft.many.cascade import CascadeDrafter
from forerun.models.runner import Read, Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from kit.drafters import FixedLength
from kit.laws import chi_square
from law.drafters import DRAFTERS, built
from law.fuzz import bench_of, run

ROOT_TEXT = [1, 403, 407, 261]  # "Once upon a"
TOP_K, NUM_TOKENS, NUM_TEXTS, TEMPERATURE = 4, 3, 2500, 2.0

FLAT = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=NUM_TOKENS, ignore_eos=True)
CHAIN = Speculation(3)


class RandomDepth(FixedDepth):
    """Any depth, at any time, for any sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    @override
    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        budgets = super().budgets(load, outlook, spare)
        return [
            Budget.of(Speculation(self.rng.randrange(1 + b.depth), self.rng.choice([1, 2]))) if b.depth else NO_DRAFT
            for b in budgets
        ]


class KeepsOddIds(FixedDepth):
    """Looks at the drawn tokens and keeps odd ids only."""

    @override
    def admit(self, draft: Draft, load: Load) -> DraftTree:
        tree = draft.tree
        is_odd = (tree.tokens % 2 == 1) | (tree.parents < 0)
        paths = tree.paths()
        on_path = torch.where(paths >= 0, is_odd.gather(1, paths.clamp_min(0).flatten(1)).view(paths.shape), True)
        keep = on_path.all(2) & tree.valid
        return replace(tree, tokens=torch.where(keep, tree.tokens, -1), parents=torch.where(keep, tree.parents, -1))


class Refusing(FixedDepth):
    """Removes all draft tokens after they were drafted."""

    @override
    def admit(self, draft: Draft, load: Load) -> DraftTree:
        return DraftTree.bare(draft.tree.tokens[:, 0])

    @override
    def record(self, outcome: Outcome) -> None:
        assert not any(row.num_drafted for row in outcome.rows)


POLICIES = [RandomDepth, KeepsOddIds, Refusing]


def texts(
    controller: Controller | None,
    params: Sequence[SamplingParams],
    verification: Verification = "coupled",
    speculation: Speculation | bool = CHAIN,
    drafter: Callable[[Runner], Drafter] | None = None,
) -> list[list[int]]:
    requests = bench_of("float32").requests()
    options = EngineOptions(max_num_seqs=64, verification=verification)
    engine = bench_of("float32").engine(None, 16384, controller=controller, options=options)
    engine.drafter = bench_of("float32").model_drafter(16384) if drafter is None else drafter(engine.runner)
    return run(engine, [requests.sequences(Request.of(ROOT_TEXT, p, speculation))[0] for p in params])


@pytest.mark.short("RandomDepth")
@pytest.mark.parametrize("policy", POLICIES)
def test_coupled_tokens_are_those_of_plain_decoding(policy: type[Controller]) -> None:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40) for i in range(8)]
    plain = texts(None, params, speculation=False)
    assert texts(policy(), params) == plain
    assert texts(policy(), params, speculation=Speculation(3, 3, 9)) == plain


@pytest.fixture(scope="module")
def exact() -> dict[tuple[int, ...], float]:
    """The joint law of the first NUM_TOKENS tokens at temperature 1 under top-k, from the target's logits."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    runner = bench_of("float32").runner
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in laws.items():
            read = Read(0, ROOT_TEXT + list(text), judged=[len(ROOT_TEXT) + len(text) - 1])
            logits = runner.read([read]).logits
            runner.release([0])
            best = logits[0].double().topk(TOP_K)
            for token, p in zip(best.indices.tolist(), (best.values / TEMPERATURE).softmax(0).tolist(), strict=True):
                longer[(*text, token)] = chance * p
        laws = longer
    return laws


def misfit(
    exact: dict[tuple[int, ...], float],
    policy: type[Controller],
    rule: Verification,
    speculation: Speculation = CHAIN,
    drafter: Callable[[Runner], Drafter] | None = None,
) -> float:
    """The p-value of the first tokens of many texts against their exact law."""
    params = [replace(FLAT, seed=i) for i in range(NUM_TEXTS)]
    seen = Counter(tuple(text[len(ROOT_TEXT) :]) for text in texts(policy(), params, rule, speculation, drafter))
    assert set(seen) <= set(exact)
    cells = sorted(exact)
    counts, expected = ([float(seen[c]) for c in cells], [exact[c] * NUM_TEXTS for c in cells])
    return chi_square(torch.tensor([counts]), torch.tensor([expected], dtype=torch.float64))


@pytest.mark.short("KeepsOddIds-token")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("policy", [RandomDepth, KeepsOddIds])
def test_rejection_rules_keep_the_law_under_any_policy(
    exact: dict[tuple[int, ...], float], policy: type[Controller], rule: Verification
) -> None:
    assert misfit(exact, policy, rule) > 1e-3


@pytest.mark.full
def test_keeping_the_law_of_a_pruned_tree_is_caught(
    exact: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftTree, "without_law", lambda self: self)
    assert misfit(exact, KeepsOddIds, "token") < 1e-5


TREE = Speculation(3, 2, 6)


def drawing(name: str, target: Runner) -> Drafter:
    """A drafter of the table; or a cascade whose judge has no cache, so that the lower member's laws are declared."""
    if name != "cascade-without-room":
        return built(name, target, num_tokens=8192)
    lower, judge = built("model:stories280k", target, num_tokens=8192), built("model:itself", target, num_tokens=0)
    assert isinstance(judge, Judge)
    return CascadeDrafter(lower, judge, FixedLength(2))


@pytest.mark.full
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", [*DRAFTERS, "cascade-without-room"])
def test_every_drafter_keeps_the_law_in_the_engine(
    exact: dict[tuple[int, ...], float], name: str, rule: Verification, speculation: Speculation
) -> None:
    assert misfit(exact, FixedDepth, rule, speculation, partial(drawing, name)) > 1e-3
