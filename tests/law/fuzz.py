"""A drafter that is right at random, around real ones; and engines built by hand for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch

from forerun.accept.delta import Delta
from forerun.config import QUANTIZATIONS, EngineOptions, KernelChoice, Quantization, Speculation
from forerun.control.controller import Controller
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook, adoptable
from forerun.draft.model.model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from kit.checkpoints import SMALL, TARGET
from kit.quantized_folders import KINDS, write_quantized
from kit.unchecked import unchecked


@dataclass(slots=True)
class RandomlyRight:
    """Copies the known answer, each sequence's guesses right at a rate of its own; or lets a real drafter guess.

    Real drafters are told everything, so their state is there to be compared with one rebuilt. Now and then a draft is
    one of the `faults`.
    """

    rng: random.Random
    answers: dict[int, list[int]]
    members: Sequence[Drafter]
    vocab: int
    faults: Sequence[Callable[[Draws, Sequence[Budget]], Draft]] = ()
    names: tuple[str, ...] = ("random",)
    texts: dict[int, int] = field(default_factory=dict)  # tokens committed, the root not counted

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(tap for member in self.members for tap in member.taps))

    def observe(self, news: Committed) -> None:
        for member in self.members:
            columns = [self.taps.index(tap) for tap in member.taps]
            member.observe(replace(news, features=news.features[:, columns] if news.features is not None else None))
        for seq_id, tokens, _ in news.rows():
            self.texts[seq_id] = self.texts.get(seq_id, 0) + len(tokens)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return min((adoptable(member, text, most, salt) for member in self.members), default=most)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        if self.faults and self.rng.random() < 0.1:
            return self.rng.choice(self.faults)(draws, budgets)
        if self.members and self.rng.random() < 0.5:
            return self.rng.choice(self.members).propose(draws, budgets, tail)
        trees = [self.tree(s, b, int(r)) for s, b, r in zip(draws.seq_ids, budgets, draws.roots_tokens, strict=True)]
        widest = max(len(tokens) for tokens, _ in trees)
        tokens = torch.tensor([t + [-1] * (widest - len(t)) for t, _ in trees])
        parents = torch.tensor([p + [-1] * (widest - len(p)) for _, p in trees])
        return Draft(DraftTree(tokens, parents, depth=max(b.depth for b in budgets), width=4))

    def tree(self, seq_id: int, budget: Budget, root: int) -> tuple[list[int], list[int]]:
        """The answer's continuation, wrong from some depth on, with wrong branches beside it where there is room."""
        tokens, parents, rate = [root], [-1], (seq_id % 5) / 4
        answer = self.answers.get(seq_id, [])[self.texts.get(seq_id, 0) + 1 :]
        node = 0
        for token in answer[: self.rng.randrange(budget.depth + 1)]:
            if self.rng.random() > rate:
                token = (token + 1) % self.vocab
            siblings = self.rng.randrange(3) if budget.width > 1 else 0
            guesses = [token, *((token + 2 + i) % self.vocab for i in range(siblings))]
            guesses = guesses[: max(0, budget.nodes - len(tokens) + 1)]
            first, right = len(tokens), self.rng.randrange(max(1, len(guesses)))
            tokens += guesses[1 : right + 1] + guesses[:1] + guesses[right + 1 :]
            parents += [node] * len(guesses)
            if not guesses:
                break
            node = first + right
        return tokens, parents

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook(unread=[0] * len(seq_ids), limit=[9] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        for member in self.members:
            member.forget(seq_ids)
        for seq_id in seq_ids:
            self.texts.pop(seq_id, None)


class Numbers(TypedDict):
    """What LLM calls them."""

    dtype: str
    quantize: Quantization | None
    kernels: KernelChoice


def number_format(name: str) -> Numbers:
    """ "float32", "bfloat16", "int8", "int4": by the compiled kernels where there are any; "int8 by torch" without.

    Of a folder of KINDS it is what the folder says.
    """
    numbers, _, torch = name.partition(" by ")
    quantize = next((each for each in QUANTIZATIONS if each == numbers), None)
    dtype = "auto" if quantize or name in KINDS else numbers
    return Numbers(dtype=dtype, quantize=quantize, kernels="torch" if torch else "auto")


@cache
def quantised(folder: Path, kind: str) -> TemporaryDirectory[str]:
    """The model of a folder in one of KINDS, for as long as tests run."""
    into = TemporaryDirectory()
    write_quantized(folder, Path(into.name), kind)
    return into


@dataclass(slots=True)
class Bench:
    """The reference pair, loaded once; engines of any size over it."""

    target: Blueprint
    draft: Blueprint
    runner: Runner
    reader: Runner

    @classmethod
    def of(cls, target: Path = TARGET, small: Path = SMALL, dtype: str = "float32") -> Bench:
        folders = [quantised(each, dtype).name if dtype in KINDS else str(each) for each in (target, small)]
        target, draft = (Blueprint.of(folder, **number_format(dtype)) for folder in folders)
        return cls(target, draft, target.load(1 << 14), draft.load(1 << 14))

    def with_cache(self, runner: Runner, num_tokens: int) -> Runner:
        """The same weights over a cache of its own."""
        return Runner.of(runner.decoder, num_tokens, 16)

    def model_drafter(self, num_tokens: int = 4096) -> ModelDrafter:
        return ModelDrafter(self.with_cache(self.reader, num_tokens), self.target.config.vocab_size)

    def engine(
        self,
        drafter: Drafter | None = None,
        num_tokens: int = 8192,
        controller: Controller | None = None,
        options: EngineOptions | None = None,
    ) -> Engine:
        runner = self.with_cache(self.runner, num_tokens)
        return Engine(runner, drafter, options=options, controller=controller, num_ids=self.target.config.vocab_size)

    def requests(self) -> RequestChecker:
        c = self.target.config
        return RequestChecker(self.target.tokenizer(), c.vocab_size, c.max_positions, c.eos_ids, Speculation())


def run(
    engine: Engine,
    sequences: Sequence[object],
    hear: Callable[[Delta], None] = lambda _: None,
    after_round: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Run sequences to their ends; all their tokens. `hear` is told what they gain."""
    with unchecked():
        for sequence in sequences:
            engine.submit(sequence)  # type: ignore[arg-type]
        while engine.has_work:
            for delta in engine.step():
                hear(delta)
            after_round()
    return [sequence.tokens for sequence in sequences]  # type: ignore[attr-defined]


def run_checked(bench: Bench, engine: Engine, sequences: Sequence[object]) -> list[list[int]]:
    """As `run`, and after each round the cache holds what a fresh reading of the committed tokens would leave."""

    def check() -> None:
        assert not engine.runner.tails
        engine.runner.cache.check()
        for text in engine.sequences.values():
            if text.id in engine.runner.cache and text.num_read:
                anew = read_anew(bench, engine.runner, text.tokens[: text.num_read])
                assert all(torch.equal(a, b) for a, b in zip(rows_of(engine.runner, text.id), anew, strict=True))

    return run(engine, sequences, after_round=check)


def read_anew(bench: Bench, runner: Runner, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a text read in one go."""
    fresh = bench.with_cache(runner, 1024)
    if tokens:
        fresh.read([Read(0, list(tokens))])
        fresh.keep([0], [range(len(tokens))])
    else:
        fresh.cache.reserve([0], [0])
    return rows_of(fresh, 0)


def rows_of(runner: Runner, seq_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The committed keys and values of a sequence."""
    first = runner.cache.start(seq_id)
    run = slice(first, first + runner.cache.length(seq_id))
    return runner.cache.keys[:, :, run], runner.cache.values[:, :, run]
