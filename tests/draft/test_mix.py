"""A mix compared with its members alone: what each of them drafts, declares, reads and observes is the same."""

import itertools
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import MERGED, Budget, Committed, Draft, Drafter, Outlook
from forerun.draft.many.cascade import CascadeDrafter
from forerun.draft.many.mix import ANY_SURVIVAL, MixDrafter, add_node, judged_run, merge, mixed_root
from forerun.draft.text.ngram import NgramDrafter
from forerun.draft.text.suffix import SuffixDrafter
from forerun.drafters import plan_drafter
from forerun.engine.engine import Engine
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.decoder import Outputs
from forerun.models.runner import DeviceTokens, PartialPass, Read, Runner
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree, HostTree
from kit.checkpoints import SMALL
from kit.drafters import FixedLength
from kit.texts import story
from kit.unchecked import unchecked
from law.drafters import context
from law.fuzz import bench_of, run, run_checked

SPECS = ("ngram", f"model:{SMALL}", "early-exit:2", "suffix", f"cascade[ngram,model:{SMALL}]")
MIX = f"mix[{','.join(SPECS)}]"
VOCAB = 512


def built(spec: str) -> DrafterWithTarget:
    """A drafter with its own target."""
    plan = plan_drafter(spec, context())
    target = Runner.of(context().target.load(64).decoder, 2048)
    drafter = plan.build(dict.fromkeys(plan.models, 2048), None, target)
    assert drafter is not None
    for member in getattr(drafter, "members", [drafter]):
        if isinstance(member, CascadeDrafter):
            member.lengths = FixedLength(2)  # measured lengths differ, which changes drafts in rejection modes
    return DrafterWithTarget(target, drafter)


def nodes_of(draft: Draft, row: int) -> dict[tuple[int, ...], list[float] | None]:
    """A row's paths, each with the law that its children were drawn from."""
    tree = draft.tree
    found: dict[tuple[int, ...], list[float] | None] = {}
    for node, path in enumerate(tree.path_tokens()[row].tolist()):
        if tree.tokens[row, node] < 0:
            continue
        at = -1 if tree.q is None else int(tree.q.row[row, node])
        law = None if at < 0 or tree.q is None else tree.q.dense(VOCAB)[at].tolist()
        children = (tree.parents[row] == node).any()
        found[tuple(token for token in path if token >= 0)] = law if children else None
    return found


def branches(draft: Draft, row: int, member: int, chances: Tensor | None = None) -> HostTree:
    """A row of a member's draft, as the input of `merge`."""
    tokens, parents, number = draft.tree.tokens[row].tolist(), draft.tree.parents[row].tolist(), {0: 0}
    survival = draft.survival if chances is None else chances[None].expand(row + 1, -1)
    assert survival is not None
    tree = mixed_root(tokens[0], member)
    for node in range(1, len(tokens)):
        if tokens[node] >= 0:
            number[node] = add_node(tree, tokens[node], number[parents[node]], float(survival[row, node]), member)
    return tree


@pytest.mark.short("3-True")
@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_a_row_of_one_member_is_what_that_member_drafts_alone(width: int, rejection: bool) -> None:
    """Rows of all members in one batch, some of them merged: tokens, laws, and the recorded drafters of nodes."""
    rng, mix = random.Random(f"{width} {rejection}"), built(MIX)
    alone = [built(spec) for spec in SPECS]
    rows = [Row(s, story(20 + 7 * s, s)) for s in range(6)]
    for drafter in (mix, *alone):
        drafter.observe(committed(rows))
    for temperature in (0.0, 1.0, 1.0):
        members = [rng.randrange(len(SPECS) + 1) for _ in rows]
        budgets = [Budget(rng.randint(0, 4), width, 6, member) for member in members]
        budgets = [b if b.drafter < len(SPECS) else Budget(b.depth, width * len(SPECS), 6, b.drafter) for b in budgets]
        draws = draws_of(rows, VOCAB, temperature=temperature, rejection=rejection)
        with unchecked():
            found = mix.propose(draws, budgets)
        assert found.drafter is not None
        assert found.drafter[:, 0].tolist() == [b.drafter if b.depth else -1 for b in budgets]
        for i, budget in enumerate(budgets):
            drafted_by = found.drafter[i][found.tree.tokens[i] >= 0][1:].tolist()
            if budget.drafter < len(SPECS):
                own_budgets = [Budget(b.depth if b.drafter == budget.drafter else 0, b.width, b.nodes) for b in budgets]
                expected = alone[budget.drafter].propose(draws, own_budgets)
                assert nodes_of(found, i) == nodes_of(expected, i)
                assert set(drafted_by) <= {budget.drafter}
            else:
                assert all(law is None for law in nodes_of(found, i).values())
                assert all(0 <= member < len(SPECS) for member in drafted_by)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_merged_row_is_the_merger_of_the_members_own_drafts(temperature: float) -> None:
    """Members without survival estimates are merged by the mix's estimate of their acceptance."""
    mix, alone = built(MIX), [built(spec) for spec in SPECS]
    rows = [Row(s, story(40 + 7 * s, s)) for s in range(4)]
    for drafter in (mix, *alone):
        drafter.observe(committed(rows))
    num, merged = len(SPECS), Budget(3, 2 * len(SPECS), 7, len(SPECS))
    draws = draws_of(rows, VOCAB, temperature=temperature)
    found = mix.propose(draws, [merged] * 4)
    each = [drafter.propose(draws, [Budget(3, 2, 7, min_survival=ANY_SURVIVAL)] * 4) for drafter in alone]
    estimate = torch.tensor([1.0, 0.7, 0.7**2, 0.7**3])
    for row in range(4):
        trees = [
            branches(draft, row, member, estimate if draft.survival is None else None)
            for member, draft in enumerate(each)
        ]
        expected = merge(trees, merged)
        assert [t for t in found.tree.tokens[row].tolist() if t >= 0] == expected.tokens
        assert [p for p in found.tree.parents[row].tolist() if p >= 0] == expected.parents[1:]
        assert found.drafter is not None
        assert found.drafter[row, : len(expected.drafters)].tolist() == [num, *expected.drafters[1:]]
    assert {draft.survival is None for draft in each} == {True, False}


def test_only_members_with_a_row_are_called() -> None:
    members = [FixedDrafter([i]) for i in range(3)]
    mix = MixDrafter(members, ["a", "b", "c"])
    rows = [Row(0, [5]), Row(1, [6]), Row(2, [7])]
    draws = draws_of(rows, VOCAB)
    assert mix.propose(draws, [Budget(0)] * 3).tree.depth == 0
    draft = mix.propose(draws, [Budget(1), Budget(0), Budget(1, drafter=2)])
    assert [member.num_asked for member in members] == [1, 0, 1]
    assert draft.tree.tokens.tolist() == [[5, 0], [6, -1], [7, 2]]
    assert draft.drafter is not None
    assert draft.drafter.tolist() == [[0, 0], [-1, -1], [2, 2]]
    assert [taken_s > 0 for taken_s in draft.drafter_s] == [True, False, True]
    assert draft.pass_s == 0.5
    mix.propose(draws, [Budget(1, 3, 3, 3), Budget(0), Budget(0)])
    assert [member.num_asked for member in members] == [2, 1, 2]


@dataclass
class FixedDrafter:
    """Drafts fixed tokens, and records what it observes."""

    draft_tokens: list[int]
    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("noted",)
    num_asked: int = 0
    observed: list[Committed] = field(default_factory=list)

    def observe(self, news: Committed) -> None:
        self.observed.append(news)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        self.num_asked += 1
        chains = [[row.tokens[-1], *self.draft_tokens[: b.depth]] for row, b in zip(draws.rows, budgets, strict=True)]
        return Draft(DraftTree.of_texts(chains), pass_s=0.25)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([len(self.draft_tokens)] * len(seq_ids), [self.draft_tokens[0]] * len(seq_ids), self.estimate)

    def estimate(self, i: int, _least: float) -> Sequence[float]:
        return [0.5]

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.observed.clear()


def test_each_member_receives_its_own_taps_and_gives_its_own_outlook() -> None:
    members = [FixedDrafter([3], taps=(4, 1)), FixedDrafter([9, 1]), FixedDrafter([5], taps=(-1, 4))]
    mix = MixDrafter(members, ["a", "b", "c"])
    assert mix.taps == (-1, 1, 4)
    assert mix.names == ("a", "b", "c", MERGED)
    features = torch.randn(5, 3, 8)
    news = Committed([0, 1], [1, 2, 3, 4, 5], [0, 2, 5], [6, 7], features)
    mix.observe(news)
    assert members[1].observed[0].features is None
    for member in (members[0], members[2]):
        shown = member.observed[0].features
        assert shown is not None
        assert all(torch.equal(shown[:, i], features[:, mix.taps.index(tap)]) for i, tap in enumerate(member.taps))
    outlook = mix.outlook([0, 1])
    assert (outlook.unread, outlook.limit) == ([2, 2], [9, 9])
    assert list(outlook.drafters) == ["a", "b", "c"]
    assert outlook.drafters["c"] == members[2].outlook([0, 1])
    mix.forget([0])
    assert not any(member.observed for member in members)


@dataclass
class Adopting(FixedDrafter):
    """Needs no states of the first `most_adopted` tokens of a text."""

    most_adopted: int = 0

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return min(most, self.most_adopted)


def test_a_mix_adopts_no_more_of_a_text_than_any_member() -> None:
    members = [Adopting([4], (0,), most_adopted=3), Adopting([4], (1,), most_adopted=5), FixedDrafter([4])]
    for order in (members, members[::-1]):
        assert MixDrafter(order, ["a", "b", "c"]).adoptable(range(9), 8, "") == 3


def test_a_member_that_is_seldom_accepted_counts_less_in_merged_trees() -> None:
    """Of two members without survival estimates one is always wrong: with nodes for one chain, the other's is kept."""
    wrong, right = FixedDrafter([9, 9]), FixedDrafter([4, 5])
    mix, text = MixDrafter([wrong, right], ["wrong", "right"]), [1, 2]
    mix.observe(committed([Row(0, text)]))
    budget, kept = Budget(2, 2, 2, 2), []
    for _ in range(6):
        draft = mix.propose(draws_of([Row(0, text)], VOCAB), [budget])
        kept.append([t for t in draft.tree.tokens[0, 1:].tolist() if t >= 0])
        before, text = len(text) - 1, [*text, 4, 5, 2]
        mix.observe(committed([Row(0, text)], [before]))
    assert kept[0] == [9, 4]  # the same estimate for both
    assert kept[-1] == [4, 5]
    assert not mix.merged


@pytest.mark.parametrize("seed", range(30))
def test_the_judged_run_is_what_a_walk_through_the_tree_finds(seed: int) -> None:
    rng, tree, paths = random.Random(seed), mixed_root(0, 0), [tuple[int, ...]()]
    for _ in range(rng.randint(0, 8)):
        parent = rng.randrange(len(paths))
        path = (*paths[parent], rng.randrange(3))
        if path not in paths:
            tree.add(path[-1], parent, 1.0)
            paths.append(path)
    text = tuple(rng.randrange(3) for _ in range(4))
    right = max(n for n in range(5) if text[:n] in paths)
    offered = right + any(len(path) > right and path[:right] == text[:right] for path in paths)
    assert judged_run(tree, text) == (min(offered, 4), right)


@pytest.mark.parametrize("seed", range(10))
def test_outlooks_report_what_members_of_a_merged_tree_would_have_had_accepted_alone(seed: int) -> None:
    """For the last round only, whatever was drafted before: merged trees, one member's, or nothing.

    A sequence that was forgotten has no results, even if its text is observed again from the start.
    """
    rng = random.Random(seed)
    fixed = [[rng.randrange(3, 5) for _ in range(3)] for _ in range(2)]
    mix = MixDrafter([FixedDrafter(tokens) for tokens in fixed], ["a", "b"])
    texts = {0: [1, 2], 1: [1, 3]}
    mix.observe(committed([Row(seq_id, text) for seq_id, text in texts.items()]))
    assert all(not outlook.merged_runs for outlook in mix.outlook([0, 1]).drafters.values())
    for _ in range(12):
        budgets = [
            rng.choice([Budget(3, 2, 6, 2), Budget(3, drafter=0), Budget(3, drafter=1), Budget(0)]) for _ in texts
        ]
        if any(budget.depth for budget in budgets):
            mix.propose(draws_of([Row(seq_id, text) for seq_id, text in texts.items()], VOCAB), budgets)
        expected: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        rows, before = [], []
        for (seq_id, text), budget in zip(list(texts.items()), budgets, strict=True):
            new = [rng.randrange(3, 5) for _ in range(rng.randint(1, 4))]
            for member, tokens in enumerate(fixed):
                right = max(n for n in range(min(3, len(new)) + 1) if tokens[:n] == new[:n])
                judged = min(right + 1, 3, len(new))
                expected[member].append((judged, right) if budget.drafter == 2 else (0, 0))
            before.append(len(text) - 1)
            texts[seq_id] = [*text, *new]
            rows.append(Row(seq_id, texts[seq_id]))
        forgotten, first = rng.choice([(), (0,), (1,)]), rng.random() < 0.5
        for seq_id, runs in itertools.product(forgotten, expected.values()):
            before[seq_id], runs[seq_id] = before[seq_id] * (not first), (0, 0)
        if first:
            mix.forget(forgotten)
        mix.observe(committed(rows, before))
        if not first:
            mix.forget(forgotten)
        found = [list(outlook.merged_runs) or [(0, 0)] * 2 for outlook in mix.outlook([0, 1]).drafters.values()]
        assert found == list(expected.values())


@pytest.mark.short("320")
@pytest.mark.parametrize("num_tokens", [2048, 320])
def test_the_targets_cache_stays_right_when_several_members_read_in_it(num_tokens: int) -> None:
    """Early exit leaves keys and values in the target's cache for rows that it drafted alone; for merged rows, and if
    two members read, they must be removed. After each round the cache equals that of the committed text."""
    bench = bench_of("float32")
    engine = bench.engine(None, num_tokens, options=EngineOptions(max_num_seqs=5))
    exits = [EarlyExitDrafter(engine.runner, layer) for layer in (1, 3)]
    members: list[Drafter] = [NgramDrafter(), *exits, SuffixDrafter()]
    engine.drafter = mix = MixDrafter(members, ["ngram", "first", "third", "suffix"])
    rng, requests = random.Random(2), bench.requests()
    requests.drafter_names = mix.names
    texts = []
    for i in range(8):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=20, ignore_eos=True)
        speculation = Speculation(rng.randint(2, 4), drafter=rng.choice([None, "first", "third", MERGED]))
        texts.append(requests.sequences(Request.of(story(rng.choice([1, 20, 50]), i), params, speculation))[0])
    expected = run(bench.engine(), [requests.sequences(Request.of(list(t.tokens), t.params, False))[0] for t in texts])
    passes = resumed(engine)
    assert run_checked(bench, engine, texts) == expected
    assert len(passes) > 5


def resumed(engine: Engine) -> list[PartialPass]:
    """A list to which passes append the partial pass that they continue; other passes must find no draft tokens."""
    found, read = list[PartialPass](), engine.runner.read

    def counted(
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        partial: PartialPass | None = None,
        inputs: torch.Tensor | None = None,
    ) -> Outputs:
        found.extend([] if partial is None else [partial])
        left = [engine.runner.cache.tail(r.seq_id) if r.seq_id in engine.runner.cache else 0 for r in reads]
        assert left == ([0] * len(reads) if partial is None else partial.counts)
        return read(reads, taps, drawn, partial, inputs)

    engine.runner.read = counted  # type: ignore[method-assign]
    return found
