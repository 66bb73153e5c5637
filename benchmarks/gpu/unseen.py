"""Measures how much time a round saves if the host does not wait for a draft model's tokens, in alternating modes.

- `unseen` is what forerun does: draft tokens go from the graph that samples a chain straight into the target's pass,
  while the host lays out that pass.
- `waited`: the host waits for the draft tokens but does not use them, so the difference is the cost of the wait.
- `seen`: the host builds the tree from the draft tokens, as it does where a CPU samples them. Rounds would run like
  this if unseen draft tokens were not supported. The check of the tree is left out, because the compiled one takes
  almost no time.

The models are the bundled pair, with the target widened as in `family.py`. Decoding is greedy, at fixed depths.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.family import BATCHES, PROMPTS, target_of
from benchmarks.gpu.setting import Setting, WeightFormat

from forerun import LLM, SamplingParams
from forerun.models.chains import Chains
from forerun.request import requests_of
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree

DEPTHS, MODES = (4, 8), ("unseen", "waited", "seen")
ROUNDS, REPEATS = 24, 3  # of each mode, after one run that compiles and captures
CONTEXT = 512
DrawChains = Callable[..., Chains | None]


def unseen_draft_tokens(setting: Setting, form: WeightFormat) -> None:
    """Measure a round's milliseconds in each mode. Raises AssertionError if the modes give different tokens."""
    num_rounds, repeats = (2, 1) if setting.dry else (ROUNDS, REPEATS)
    batches, depths = ((2,), DEPTHS[:1]) if setting.dry else (BATCHES, DEPTHS)
    llm = LLM(target_of(setting), "model:stdlib-draft", device=setting.placement(form), quantize=form.quantize,
              dtype="float32" if setting.dry else "bfloat16", speculation=max(depths), max_model_len=CONTEXT,
              max_num_seqs=max(batches), prefix_cache=False)  # fmt: skip
    switch = Switch(llm)
    for depth, batch in itertools.product(depths, batches):
        runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
        for mode in MODES * (1 + repeats):
            switch.set(mode)
            runs[mode].append(rounds_of(llm, batch, depth, num_rounds))
        for mode, (first, *measured) in runs.items():
            round_ms = statistics.median(itertools.chain.from_iterable(each.round_ms for each in measured))
            num_tokens = statistics.mean(each.num_tokens for each in measured) / num_rounds
            setting.add("unseen", format=form.name, mode=mode, batch=batch, depth=depth, round_ms=round_ms,
                        tokens_per_round=num_tokens / batch, tokens_per_s=num_tokens / round_ms * 1e3,
                        same=all(each.answers == runs[MODES[0]][0].answers for each in [first, *measured]))  # fmt: skip
        answers = [each.answers for each in itertools.chain.from_iterable(runs.values())]
        assert all(each == answers[0] for each in answers), f"modes differ at batch {batch}, depth {depth}"
        assert switch.num_switched, "the drafter's runner drew no chain"


@dataclass(frozen=True, slots=True)
class Run:
    """The time of each round, the sum of their tokens, and the tokens of each sequence."""

    round_ms: list[float]
    num_tokens: int
    answers: list[list[int]]


def rounds_of(llm: LLM, batch: int, depth: int, num_rounds: int) -> Run:
    """Run `num_rounds` rounds in which all sequences are drafted, after a first one that is not measured."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=CONTEXT - 32, ignore_eos=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    sequences = [s for r in requests_of(prompts, params, speculation=depth) for s in llm.requests.sequences(r)]
    for sequence in sequences:
        engine.submit(sequence)
    begins = [len(sequence.tokens) for sequence in sequences]
    while any(len(s.tokens) == begin for s, begin in zip(sequences, begins, strict=True)):
        engine.step()
    engine.step()
    round_ms, before = [], sum(len(s.tokens) for s in sequences)
    for _ in range(num_rounds):
        began_s = time.perf_counter()
        deltas = engine.step()
        round_ms.append((time.perf_counter() - began_s) * 1e3)
        assert len(deltas) == batch, "every sequence gains tokens in every round"
    answers = [s.tokens[begin:] for s, begin in zip(sequences, begins, strict=True)]
    num_tokens = sum(len(s.tokens) for s in sequences) - before
    for sequence in sequences:
        engine.cancel(sequence.request_id)
    return Run(round_ms, num_tokens, answers)


class Switch:
    """Sets the mode in which the draft model of an engine passes on its chains."""

    def __init__(self, llm: LLM) -> None:
        self.engine: Any = llm.engine
        self.runner: Any = llm.drafter.runner  # type: ignore[union-attr]
        self.draw_chains: DrawChains = self.runner.draw_chains
        self.num_switched = 0

    def set(self, mode: str) -> None:
        """Use this mode from the next round on."""
        self.runner.draw_chains = {"unseen": self.draw_chains, "waited": self.waited, "seen": self.seen}[mode]
        vars(self.engine).pop("sanitized", None)
        if mode == "seen":
            self.engine.sanitized = unchecked

    def waited(self, *arguments: Any, **more: Any) -> Chains | None:
        """Draw chains, and wait until their tokens are on the host, which does not use them."""
        chains = self.draw_chains(*arguments, **more)
        if chains is not None and chains.draft_tokens is not None:
            chains.draft_tokens.tolist()
            self.num_switched += 1
        return chains

    def seen(self, draws: Draws, *arguments: Any, **more: Any) -> Chains | None:
        """Draw chains, and return them as trees whose tokens the host knows."""
        chains = self.draw_chains(draws, *arguments, **more)
        if chains is None or chains.draft_tokens is None:
            return chains
        assert not chains.laws, "no laws are drawn from"
        self.num_switched += 1
        trees = []
        for row, tree, drawn in zip(draws.rows, chains.trees, chains.draft_tokens.tolist(), strict=True):
            draft_tokens = drawn[: len(tree.tokens) - 1]
            assert min(draft_tokens, default=0) >= 0, "every draft token was drawn"
            trees.append(HostTree([row.tokens[-1], *draft_tokens], list(tree.parents)))
        return Chains(trees, chains.num_read)


def unchecked(tree: DraftTree, *_: Any) -> DraftTree:
    """Return the tree unchanged; it replaces the engine's check of draft trees."""
    return tree
