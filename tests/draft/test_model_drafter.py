"""The model drafter compared with plain decoding of its checkpoint, after any history and with any cache size.

As a judge its logits after any draft tokens are those of reading the text in one pass, and it reads no token twice.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typing_extensions import override

from draft.rounds import Row, committed, draws_of
from forerun.draft.base import Budget, ChainToJudge, Committed, Draft, Judge, JudgeLogits
from forerun.draft.model.follower import CHUNK_TOKENS, TAIL_TOKENS
from forerun.draft.model.model import ModelDrafter
from forerun.models.chains import Chains
from forerun.models.decoder import Outputs
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from kit.assertions import assert_same
from kit.checkpoints import SMALL
from kit.engines import CountingRunner, counting
from kit.texts import VOCAB, random_text
from law.fuzz import rows_of

CONTEXT = 256


@pytest.fixture(scope="module")
def loaded() -> Runner:
    return Blueprint.of(str(SMALL), dtype="float32").load(64)


def make(loaded: Runner, num_tokens: int = 2048, vocab: int = VOCAB) -> ModelDrafter:
    """A model drafter with its own cache."""
    return ModelDrafter(CountingRunner.of(loaded.decoder, num_tokens), vocab)


def propose(
    drafter: ModelDrafter,
    rows: Sequence[Row],
    budgets: Sequence[Budget],
    temperature: float = 1.0,
    tail: Committed | None = None,
) -> Draft:
    return drafter.propose(draws_of(rows, VOCAB, temperature=temperature), budgets, tail)


def fresh(loaded: Runner, rows: Sequence[Row], budgets: Sequence[Budget], temperature: float = 1.0) -> Draft:
    """The draft of a fresh drafter that observes the texts at once."""
    drafter = make(loaded)
    drafter.observe(committed(rows))
    return propose(drafter, rows, budgets, temperature)


def plain_greedy(loaded: Runner, text: Sequence[int], count: int) -> list[int]:
    """Greedy continuation, one token at a time."""
    runner, text, out = Runner.of(loaded.decoder, 512), list(text), []
    for _ in range(count):
        logits = runner.read([Read(0, text, judged=[len(text) - 1])]).logits
        runner.keep([0], [range(len(text))])
        text = [int(logits.argmax())]
        out += text
    return out


@pytest.mark.parametrize("length", [1, 2, TAIL_TOKENS + 1, TAIL_TOKENS + 2, 60])
def test_a_chain_at_temperature_0_is_the_models_greedy_text(loaded: Runner, length: int) -> None:
    row = Row(3, random_text(length, length))
    tree = fresh(loaded, [row], [Budget(7)], temperature=0.0).tree
    assert tree.tokens[0].tolist() == [row.text[-1], *plain_greedy(loaded, row.text, 7)]


def test_accepted_draft_tokens_are_not_read_again(loaded: Runner) -> None:
    drafter, text = make(loaded), random_text(30, 0)
    drafter.observe(committed([Row(0, text)]))
    chain = propose(drafter, [Row(0, text)], [Budget(4)]).tree.tokens[0, 1:].tolist()
    for accepted, reread in ((4, 1), (2, 0), (0, 0)):
        more = [*text, *chain[:accepted], 77]
        before = counting(drafter.runner).num_read
        drafter.observe(committed([Row(0, more)], [len(text) - 1]))
        chain = propose(drafter, [Row(0, more)], [Budget(4)]).tree.tokens[0, 1:].tolist()
        assert (
            counting(drafter.runner).num_read - before == reread + 1 + 3
        )  # the last draft token, the root, draft tokens but the last
        text = more


def test_accepted_nodes_of_trees_are_not_read_again(loaded: Runner) -> None:
    """Of an accepted path only the last node may be unread, although the tree's nodes were read in another order."""
    text, budget, left_out = random_text(30, 4), Budget(4, 3, 8), 0
    draft = fresh(loaded, [Row(0, text)], [budget])
    paths, parents = draft.tree.path_tokens()[0].tolist(), set(draft.tree.parents[0].tolist())
    for node in range(1, draft.tree.tokens.shape[1]):
        drafter, path_tokens = make(loaded), [token for token in paths[node] if token >= 0]
        drafter.observe(committed([Row(0, text)]))
        before = counting(drafter.runner).num_read
        propose(drafter, [Row(0, text)], [budget])
        left_out += counting(drafter.runner).num_read - before - len(text) - len(parents - {-1, 0})
        drafter.observe(committed([Row(0, [*text, *path_tokens, 7])], [len(text) - 1]))
        assert drafter.unread(0) in ([], path_tokens[-1:])
        runner, length = Runner.of(loaded.decoder, 512), drafter.runner.length(0)
        runner.read([Read(0, [*text, *path_tokens][:length])])
        runner.keep([0], [range(length)])
        assert torch.equal(rows_of(drafter.runner, 0), rows_of(runner, 0))
    assert left_out > 0


def test_long_prompts_are_read_in_chunks_to_the_same_bits(loaded: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(s, random_text(120 + 20 * s, s)) for s in range(3)]
    budgets = [Budget(3)] * 3
    at_once = fresh(loaded, rows, budgets)
    assert sum(len(row.text) for row in rows) <= CHUNK_TOKENS
    monkeypatch.setattr("forerun.draft.model.follower.CHUNK_TOKENS", 50)
    assert_same(fresh(loaded, rows, budgets), at_once)


def test_nothing_is_drafted_beyond_the_models_context(loaded: Runner) -> None:
    drafter = make(loaded)
    for length, limit in ((CONTEXT - 2, 3), (CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 0), (CONTEXT + 9, 0)):
        row = Row(length, random_text(length, length))
        drafter.observe(committed([row]))
        assert drafter.outlook([length]).limit == [limit]
        for budget in (Budget(5), Budget(5, 2, 10)):
            tree = propose(drafter, [row], [budget]).tree
            assert tree.depth == limit
            assert int(tree.depths().max()) == limit
        drafter.forget([length])


def test_with_too_little_cache_the_youngest_rows_are_not_drafted(loaded: Runner) -> None:
    rows = [Row(s, random_text(100, s)) for s in range(4)]
    drafter = make(loaded, num_tokens=256)  # two rows of two blocks
    drafter.observe(committed(rows))
    tree = propose(drafter, rows[::-1], [Budget(3)] * 4).tree
    assert (tree.valid.sum(1) - 1).tolist() == [0, 0, 3, 3]
    drafter.runner.cache.check()
    tree = propose(drafter, rows[2:], [Budget(3)] * 2).tree  # rows that are not drafted are evicted
    assert (tree.valid.sum(1) - 1).tolist() == [3, 3]
    expected = fresh(loaded, rows[2:], [Budget(3)] * 2)
    assert torch.equal(tree.tokens, expected.tree.tokens)
    assert propose(drafter, rows, [Budget(3, 2, 8)] * 4).tree.valid.sum() > 4
    drafter.runner.cache.check()
    for length in (255, 256, 200):
        row = Row(9, random_text(length, 9))
        drafter.observe(committed([row]))
        tree = propose(drafter, [row], [Budget(40, 3, 60)]).tree
        assert tree.depth <= drafter.outlook([9]).limit[0]
        drafter.forget([9])
    drafter.forget([row.seq_id for row in rows])
    assert drafter.runner.cache.num_rows == 0
    assert drafter.runner.cache.num_free_tokens == 256


@pytest.mark.parametrize("vocab", [600, 450])
def test_logits_are_cut_or_padded_to_the_targets_vocabulary_size(loaded: Runner, vocab: int) -> None:
    drafter, row = make(loaded, vocab=vocab), Row(0, random_text(20, 3))
    row = Row(0, [t % 450 for t in row.text])
    drafter.observe(committed([row]))
    tree = drafter.propose(draws_of([row], vocab, temperature=1.0), [Budget(4, 3, 12)]).tree
    assert int(tree.tokens.max()) < min(vocab, VOCAB)
    fitted = drafter.ids.target_logits(torch.ones(2, VOCAB))
    assert fitted.isfinite().sum(1).tolist() == [min(vocab, VOCAB)] * 2
    assert fitted.shape == (2, vocab)
    if vocab > VOCAB:
        assert torch.equal(tree.tokens[0, :4], fresh(loaded, [row], [Budget(4, 3, 12)]).tree.tokens[0, :4])
        drafter.observe(committed([Row(0, [*row.text, 580, 4])], [len(row.text) - 1]))
        assert drafter.outlook([0]).limit == [0]  # it has no embedding for token 580
        assert drafter.propose(draws_of([Row(0, [580, 4])], vocab), [Budget(2)]).tree.depth == 0


@pytest.mark.parametrize("at_once", [False, True])
def test_a_draft_reports_the_time_of_its_passes(loaded: Runner, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """With a clock that only passes advance, each by another time, a draft's time is the sum of its passes'."""
    now_s, took_s = 0.0, []

    class SlowRunner(CountingRunner):
        def take(self) -> None:
            nonlocal now_s
            took_s.append(2.0 ** -len(took_s))
            now_s += took_s[-1]

        @override
        def read(self, reads: Sequence[Read], *rest: Any, **more: Any) -> Outputs:
            self.take()
            return super().read(reads, *rest, **more)

        @override
        def draw_chains(self, *arguments: Any, **more: Any) -> Chains | None:
            self.take()
            return super().draw_chains(*arguments, **more) if at_once else None

    monkeypatch.setattr("forerun.draft.model.follower.time.perf_counter", lambda: now_s)
    drafter = make(loaded)
    drafter.runner = SlowRunner(drafter.runner.decoder, drafter.runner.cache)
    row = Row(0, random_text(40, seed=3))
    drafter.observe(committed([row]))
    for depth in (1, 4):
        before = len(took_s)
        draft = propose(drafter, [row], [Budget(depth=depth)])
        assert len(took_s) - before >= (2 if at_once else depth)
        assert draft.pass_s == sum(took_s[before:])


def random_tokens(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, most))]


def logits_at_once(loaded: Runner, text: Sequence[int], num_judged: int) -> torch.Tensor:
    """The last logits of a text read in one pass."""
    runner = Runner.of(loaded.decoder, 512)
    return runner.read([Read(0, text, judged=range(len(text) - num_judged, len(text)))]).logits


def check(loaded: Runner, texts: dict[int, list[int]], chains: Sequence[ChainToJudge], judged: JudgeLogits) -> None:
    """Assert that the logits, packed in the order of the chains, are those of a fresh runner."""
    expected = [
        logits_at_once(
            loaded, [*texts[chain.seq_id][:-1], *chain.after_text, *chain.draft_tokens], 1 + len(chain.draft_tokens)
        )
        for chain in (chains[i] for i in judged.indices)
    ]
    assert torch.equal(judged.logits, torch.cat([*expected, torch.empty(0, VOCAB)]))


@pytest.mark.short("0", "1", "2")
@pytest.mark.parametrize("seed", range(6))
def test_a_judges_logits_are_those_of_the_text_read_in_one_pass(loaded: Runner, seed: int) -> None:
    """Chains that extend earlier ones, drafts between them, and committed text that equals a chain or not."""
    rng = random.Random(seed)
    judge = make(loaded, 2048 if seed % 2 else 384)
    texts = {s: [1, *random_tokens(rng, 40)] for s in range(4)}
    judge.observe(committed([Row(s, t) for s, t in texts.items()]))
    emitted: dict[int, list[int]] = {s: [] for s in texts}
    for _ in range(25):
        chosen = rng.sample(sorted(texts), rng.randint(1, 4))
        chains = [ChainToJudge(s, [texts[s][-1], *emitted[s]], random_tokens(rng, 5)) for s in chosen]
        judged = judge.judge(chains)
        assert judged.pass_s > 0
        assert list(judged.indices) == sorted(judged.indices)
        assert len(judged.indices) == len(chains) or seed % 2 == 0
        check(loaded, texts, chains, judged)
        for chain in chains:
            emitted[chain.seq_id] += [*chain.draft_tokens[: rng.randint(0, 5)], *random_tokens(rng, 1)]
        what = rng.random()
        rows = [Row(s, texts[s]) for s in chosen]
        if what < 0.2:
            judge.propose(draws_of(rows, VOCAB), [Budget(rng.randint(0, 4), rng.choice([1, 3]), 6) for _ in rows])
        elif what < 0.6:
            before = [len(texts[s]) - 1 for s in chosen]
            for s in chosen:
                texts[s] += [*emitted[s][: rng.randint(0, 9)], *random_tokens(rng, 1)]
                emitted[s] = []
            judge.observe(committed([Row(s, texts[s]) for s in chosen], before))
        judge.runner.cache.check()
        assert set(judge.runner.tails) <= {s for s in texts if judge.sequences[s].tail}


def test_a_judge_does_not_read_the_common_prefix_of_chains_again(loaded: Runner) -> None:
    judge, text = make(loaded), [1, *range(3, 33)]
    judge.observe(committed([Row(0, text)]))
    judge.judge([ChainToJudge(0, [32], [5, 6, 7])])
    for late, draft_tokens, num_read in (
        ([32, 5, 6, 9], [8], 2),  # two draft tokens stay: read are the new root and the new draft token
        ([32, 5, 6, 9, 8], [], 1),  # the last token is read again for its logits
        ([32, 5, 6, 9, 8, 4, 3], [7, 7], 4),
        ([32, 1], [], 1),
        ([32], [1, 1, 1], 4),
    ):
        before = counting(judge.runner).num_read
        judge.judge([ChainToJudge(0, late, draft_tokens)])
        assert counting(judge.runner).num_read - before == num_read


def test_chains_without_cache_space_are_not_judged(loaded: Runner) -> None:
    """The other chains are judged."""
    judge = make(loaded, 128)  # two blocks
    rows = [Row(s, [1, *range(3, 40)]) for s in range(3)] + [Row(3, [1] * 300)]
    texts = {row.seq_id: list(row.text) for row in rows}
    judge.observe(committed(rows))
    chains = [ChainToJudge(s, [texts[s][-1]], [4, 5]) for s in (2, 3, 1, 0)]
    judged = judge.judge(chains)
    assert judged.indices == [2, 3]  # the youngest has no space, and one is longer than the context
    check(loaded, texts, chains, judged)
    assert judge.judge([ChainToJudge(0, [39], range(4, 400))]).indices == []
    assert isinstance(judge, Judge)
