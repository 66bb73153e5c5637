"""A cascade drafts what its judge would draft alone, in fewer passes, after any history and with any cache size."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from draft.rounds import Row, committed, draws_of
from forerun.device import Placement
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.draft.many.cascade import CascadeDrafter, Chain, MeasuredLengths, RoundTiming, joined_tree
from forerun.draft.model.model import ModelDrafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftLaw, DraftTree
from kit.checkpoints import SMALL, TARGET
from kit.drafters import FixedLength, Stateless
from kit.engines import CountingRunner, counting
from kit.texts import VOCAB, story

LENGTHS = range(8)


@cache
def loaded(folder: Path) -> Runner:
    return Blueprint.of(str(folder), dtype="float32").load(64)


def model(folder: Path, num_tokens: int = 2048) -> ModelDrafter:
    """A model drafter with its own cache."""
    return ModelDrafter(CountingRunner.of(loaded(folder).decoder, num_tokens), VOCAB)


def cascade(lower: Drafter, judge: ModelDrafter, length: int = 3) -> CascadeDrafter:
    return CascadeDrafter(lower, judge, FixedLength(length))


def observed(drafter: Drafter, rows: Sequence[Row]) -> Drafter:
    drafter.observe(committed(rows))
    return drafter


def chains_of(draft: Draft) -> list[list[int]]:
    """The chains, roots first."""
    return [[token for token in row if token >= 0] for row in draft.tree.tokens.tolist()]


ROWS = [Row(s, story(length, s)) for s, length in enumerate((5, 40, 23, 90, 1))]
BUDGETS = [Budget(7), Budget(1), Budget(0), Budget(5, 3, 9), Budget(4, 2, 3)]
CHAINS = [Budget(7), Budget(1), Budget(0), Budget(5), Budget(3)]


def lowers() -> list[Drafter]:
    """Lower members, from good to bad, and a cascade among them."""
    return [model(TARGET), model(SMALL), NgramDrafter(), cascade(NgramDrafter(), model(SMALL), 2), Silent(), Wild()]


class Silent(Stateless):
    """Never drafts."""

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        return Draft(DraftTree.bare(draws.roots_tokens))

    @override
    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [0] * len(seq_ids))


class Wild(Silent):
    """Drafts trees that break all rules: too wide, too deep, ids out of range."""

    @override
    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        batch = len(draws.rows)
        tokens = torch.tensor([[7, 7, 11, 600, 12, -5, 9, 9]]).expand(batch, 8)
        parents = torch.tensor([[-1, 0, 0, 1, 1, 7, 4, 6]]).expand(batch, 8)
        return Draft(DraftTree(torch.cat([draws.roots_tokens[:, None], tokens[:, 1:]], dim=1), parents, 9, 3))


@pytest.mark.short("0-0.0", "3-1.0", "5-1.0", "7-0.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_cascade_drafts_what_its_judge_would_draft_alone(temperature: float, length: int) -> None:
    """Token for token, with any lower member and any number of tokens per inner round."""
    alone = observed(model(TARGET), ROWS).propose(draws_of(ROWS, VOCAB, temperature=temperature), CHAINS)
    assert [len(chain) - 1 for chain in chains_of(alone)] == [7, 1, 0, 5, 3]
    for lower in lowers():
        drafter = observed(cascade(lower, model(TARGET), length), ROWS)
        found = drafter.propose(draws_of(ROWS, VOCAB, temperature=temperature), BUDGETS)
        assert chains_of(found) == chains_of(alone)
        assert found.tree.q is None


def test_with_penalties_and_processors_it_drafts_what_its_judge_would_draft_alone() -> None:
    """The effect of parameters depends on the text before a token, here also on tokens emitted inside the round."""
    seen: list[tuple[int, ...]] = []

    def banned_after_itself(text: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(text))
        logits[text[-1]] = -torch.inf
        return logits

    params = SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, top_k=40, seed=3)
    changes: list[dict[str, Any]] = [{}, {"logits_processors": [banned_after_itself]}, {"min_tokens": 4}]
    for more in changes:
        draws = draws_of(ROWS, VOCAB)
        rows = [type(r)(r.seq_id, replace(params, **more), 9, 0, r.tokens, 1) for r in draws.rows]
        alone = observed(model(TARGET), ROWS).propose(Draws(rows, VOCAB), CHAINS)
        for lower in (model(SMALL), NgramDrafter()):
            found = observed(cascade(lower, model(TARGET)), ROWS).propose(Draws(rows, VOCAB), CHAINS)
            assert chains_of(found) == chains_of(alone)
    assert seen


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 0])
def test_a_good_lower_member_saves_passes(length: int) -> None:
    """With a lower member that is always right, each pass emits its tokens and one more, and reads only new tokens."""
    judge, row = model(TARGET), Row(0, story(30, 0))
    drafter = observed(cascade(model(TARGET), judge, length), [row])
    draws = draws_of([row], VOCAB, temperature=1.0)
    drafter.propose(draws, [Budget(1)])  # the prompt
    passes, read = counting(judge.runner).num_passes, counting(judge.runner).num_read
    depth = 8
    chain = chains_of(drafter.propose(draws, [Budget(depth)]))[0]
    assert len(chain) == depth + 1
    assert counting(judge.runner).num_passes - passes == -(-depth // (length + 1))
    assert counting(judge.runner).num_read - read == depth  # the root and all but the last, each of them once
    drafter.observe(committed([Row(0, [*row.text, *chain[1:], 99])], [len(row.text) - 1]))
    read = counting(judge.runner).num_read
    drafter.propose(draws_of([Row(0, [*row.text, *chain[1:], 99])], VOCAB, temperature=1.0), [Budget(1)])
    assert counting(judge.runner).num_read - read == 2  # the last draft token, which was not read yet, and the root


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rejection", [False, True])
def test_if_the_lower_member_costs_time_the_judge_drafts_alone_in_one_call(temperature: float, rejection: bool) -> None:
    """The lower member is not called, and tokens and laws are those of the judge without a cascade."""
    draws = draws_of(ROWS, VOCAB, temperature=temperature, rejection=rejection)
    alone = observed(model(TARGET), ROWS).propose(draws, CHAINS)
    lower, lengths = model(SMALL), MeasuredLengths()
    drafter = observed(CascadeDrafter(lower, model(TARGET), lengths), ROWS)
    for _ in range(40):  # drafts of the lower member that take long and are always rejected
        lengths.count([row.seq_id for row in ROWS], [(4, 0)] * len(ROWS))
        lengths.time(RoundTiming(4, 9.0, 5, 0.01))
    found = drafter.propose(draws, BUDGETS)
    assert chains_of(found) == chains_of(alone)
    assert counting(lower.runner).num_passes == 0
    if not rejection:
        assert found.tree.q is None
        return
    laws, laws_alone = laws_of(found), laws_of(alone)
    assert any(map(len, laws_alone)) == (temperature > 0)
    assert all(map(torch.equal, laws, laws_alone))


def laws_of(draft: Draft) -> list[torch.Tensor]:
    """For every row the laws that its draft tokens were drawn from, if any."""
    law = draft.tree.q
    if law is None:
        return [torch.empty(0, VOCAB)] * len(draft.tree.tokens)
    rows = [law.row[i, : len(chain) - 1] for i, chain in enumerate(chains_of(draft))]
    return [law.probs[row[row >= 0]] for row in rows]


def test_a_lower_model_reads_emitted_tokens_once() -> None:
    """After a tail it continues from what it read for the tail before."""
    lower, row = model(SMALL), Row(0, story(30, 0))
    drafter = observed(cascade(lower, model(TARGET), 1), [row])
    draws = draws_of([row], VOCAB, temperature=1.0)
    drafter.propose(draws, [Budget(2)])
    read, passes = counting(lower.runner).num_read, counting(lower.runner).num_passes
    drafter.propose(draws, [Budget(12)])
    num_rounds = counting(lower.runner).num_passes - passes
    assert num_rounds >= 6
    most = 2 * num_rounds  # the root, and the token that replaced a rejected one
    assert counting(lower.runner).num_read - read <= most


def test_a_cascade_stays_within_its_judges_context() -> None:
    """As deep as the judge alone, with a tail and without; where the judge's limit is 0, the lower member's counts."""
    judge = model(SMALL)  # 256 positions
    drafter = cascade(Silent(), judge, 3)
    for length, limit in ((250, 7), (254, 3), (255, 2), (256, 1), (257, 0), (300, 0)):
        row = Row(length, story(length, length))
        drafter.observe(committed([row]))
        assert drafter.outlook([length]).limit == [limit]
        assert drafter.propose(draws_of([row], VOCAB), [Budget(9)]).tree.depth == limit
        longer = Row(length, [*row.text, 5, 6])
        tail = committed([longer], [length - 1])
        assert drafter.propose(draws_of([longer], VOCAB), [Budget(9)], tail).tree.depth == max(0, limit - 2)
        drafter.forget([length])
    beyond = observed(cascade(model(SMALL), model(TARGET), 3), [Row(0, story(300, 0))])
    assert beyond.propose(draws_of([Row(0, story(300, 0))], VOCAB), [Budget(4)]).tree.depth == 4


def test_with_too_little_cache_drafts_are_shallower_or_the_lower_members() -> None:
    """A row is drafted by the judge as far as its cache allows, and otherwise by the lower member."""
    rows = [Row(s, story(50 + 5 * s, s)) for s in range(4)]
    draws, budgets = draws_of(rows, VOCAB, temperature=1.0), [Budget(12)] * 4
    enough, below = (chains_of(observed(model(each), rows).propose(draws, budgets)) for each in (TARGET, SMALL))
    for num_lower in (0, 64, 2048):
        alone = chains_of(observed(model(SMALL, num_lower), rows).propose(draws, budgets))
        for num_tokens in (0, 64, 128, 192, 256, 2048):
            drafter = cascade(model(SMALL, num_lower), model(TARGET, num_tokens), 3)
            observed(drafter, rows)
            found = chains_of(drafter.propose(draws, budgets))
            judged = [len(chain) > 1 and chain == full[: len(chain)] for chain, full in zip(found, enough, strict=True)]
            assert any(judged) == (num_tokens > 0)
            assert all(judged) or num_tokens < 2048
            assert all(j or chain == b[: len(chain)] for chain, b, j in zip(found, below, judged, strict=True))
            assert num_tokens or found == alone
            assert [len(chain) for chain in found] == [13] * 4 or min(num_tokens, num_lower) < 2048
            for member in (drafter.lower, drafter.judge):
                assert isinstance(member, ModelDrafter)
                member.runner.cache.check()
            drafter.forget(range(4))
            assert isinstance(drafter.judge, ModelDrafter)
            assert drafter.judge.runner.cache.num_free_tokens == num_tokens


def test_without_its_judge_a_cascade_drafts_what_the_lower_member_would_alone() -> None:
    """Beyond the judge's context, or without memory for it: after tails too, and with the same laws and limits."""
    rows = [Row(s, story(250 + 3 * s, s)) for s in range(4)]  # the judge's context is long enough for two
    for lower in (lambda: model(TARGET), lambda: cascade(NgramDrafter(), model(TARGET))):
        for rejection in (False, True):
            draws = draws_of(rows, VOCAB, temperature=1.0, rejection=rejection)
            drafter, alone = observed(cascade(lower(), model(SMALL)), rows), observed(lower(), rows)
            found, expected = (d.propose(draws, [Budget(4)] * 4) for d in (drafter, alone))
            assert chains_of(found)[3] == chains_of(expected)[3]
            assert drafter.outlook([3]).limit == alone.outlook([3]).limit
            assert (found.tree.q is None) == (expected.tree.q is None) == (not rejection)
            if found.tree.q is not None and expected.tree.q is not None:
                one, other = (q.dense(VOCAB)[q.row[3, :4]] for q in (found.tree.q, expected.tree.q))
                assert torch.equal(one, other)
            longer = [Row(3, [*rows[3].text, 5, 6])]
            tail, late = committed(longer, [len(rows[3].text) - 1]), draws_of(longer, VOCAB, rejection=rejection)
            one_late, other_late = (chains_of(d.propose(late, [Budget(3)], tail)) for d in (drafter, alone))
            assert one_late == other_late


def test_judged_and_unjudged_chains_of_a_round_keep_the_laws_that_they_were_sampled_from() -> None:
    """Law i is all at id i: the judge's are 1 and 2, the lower member's 3 and 4."""
    laws = torch.eye(8)
    draws = draws_of([Row(0, [1, 2]), Row(1, [1, 2])], 8, temperature=1.0, rejection=True)
    judged = Chain(0, 0, [2], 0, [5, 6], [laws[1:2], laws[2:3]])
    unjudged = DraftTree.of_texts([[2], [2, 5, 6]])
    unjudged = replace(unjudged, q=DraftLaw(torch.tensor([[-1, -1, -1], [0, 1, -1]]), laws[3:5]))
    tree = joined_tree(draws, [judged], unjudged)
    assert tree.tokens.tolist() == [[2, 5, 6], [2, 5, 6]]
    assert tree.q is not None
    assert tree.q.row[:, 2].tolist() == [-1, -1]
    assert tree.q.dense(8)[tree.q.row[:, :2]].argmax(2).tolist() == [[1, 2], [3, 4]]


def test_draft_tokens_beyond_the_judges_vocabulary_are_rejected_and_not_read() -> None:
    """With a target that has more ids than the judge, draft tokens of the lower member may have no embedding in it."""
    wide = 600
    judge = model(TARGET)
    judge.vocab_size = wide

    class Beyond(Silent):
        @override
        def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
            chains = torch.full((len(draws.rows), max(b.depth for b in budgets)), 555)
            return Draft(DraftTree.chains(draws.roots_tokens, chains))

    for rejection in (False, True):
        row = Row(0, story(20, 4))
        alone = observed(ModelDrafter(Runner.of(loaded(TARGET).decoder, 256), wide), [row])
        draws = draws_of([row], wide, rejection=rejection)
        found = observed(cascade(Beyond(), judge, 3), [row]).propose(draws, [Budget(4)])
        assert chains_of(found) == chains_of(alone.propose(draws, [Budget(4)]))
        judge.forget([0])


def test_with_passes_of_fixed_shape_it_drafts_what_its_judge_would_draft_alone() -> None:
    """With the runner of GPUs, whose draft models leave their tokens on the device."""
    fixed = Placement(torch.device("cpu"), fixed=True)

    def made(folder: Path) -> ModelDrafter:
        return ModelDrafter(Blueprint.of(str(folder), dtype="float32", device=fixed).load(512), VOCAB)

    rows, budgets = ROWS[:2], [Budget(6), Budget(3)]
    for rejection in (False, True):
        draws = draws_of(rows, VOCAB, rejection=rejection)
        alone = observed(made(TARGET), rows).propose(draws, budgets)
        found = observed(cascade(made(SMALL), made(TARGET), 2), rows).propose(draws, budgets)
        assert chains_of(found) == chains_of(alone)


def test_times_and_accepted_runs_of_inner_rounds_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of members that first read a long text are not recorded as drafting times."""
    timings: list[RoundTiming] = []
    runs: list[tuple[int, int]] = []
    drafter = CascadeDrafter(model(TARGET), model(TARGET))
    assert isinstance(drafter.lengths, MeasuredLengths)
    monkeypatch.setattr(MeasuredLengths, "best", lambda self, seq_ids, most: [min(3, m) for m in most])
    monkeypatch.setattr(MeasuredLengths, "time", lambda self, timing: timings.append(timing))
    monkeypatch.setattr(MeasuredLengths, "count", lambda self, seq_ids, news: runs.extend(news))
    rows = [Row(0, story(30, 0)), Row(1, story(40, 1))]
    observed(drafter, rows)
    drafter.propose(draws_of(rows, VOCAB), [Budget(6), Budget(4)])
    assert runs == [(3, 3), (3, 3), (1, 1)]
    assert timings == []
    draft = drafter.propose(draws_of(rows, VOCAB), [Budget(6), Budget(4)])
    assert [(t.num_drafted, t.num_tokens) for t in timings] == [(3, 8), (1, 2)]
    assert all(min(t.draft_s, t.pass_s) > 0 for t in timings)
    assert 0 < draft.pass_s <= sum(t.draft_s + t.pass_s for t in timings)
