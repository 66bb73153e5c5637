"""Tree growing with a model that is a function of the path, so that every node can be computed again."""

import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft.rounds import Row, draws_of
from forerun.config import Speculation
from forerun.draft.base import NO_DRAFT, Budget, Draft
from forerun.draft.model.grower import NodeToExpand
from forerun.draft.model.grower import grow as grow_trees
from forerun.sampling.draws import Draws
from forerun.shape import RankPath, StaticTree
from kit.assertions import assert_same

VOCAB = 32
BUDGETS = st.builds(
    lambda depth, width, extra, price: Budget(depth, width, depth + extra if depth else 0, min_survival=price),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.0, 0.05, 0.3]),
)
MODES = st.tuples(st.sampled_from([0.0, 1.0]), st.booleans())


@st.composite
def shapes(draw: st.DrawFn) -> list[RankPath]:
    """The paths of any tree of up to four levels and twelve nodes."""
    paths: list[RankPath] = []
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < 4)]))
        rank = draw(st.integers(0, 3))
        if (*above, rank) not in paths:
            paths.append((*above, rank))
    return paths


def logits_after(path: Sequence[int], *, tied: bool = False) -> Tensor:
    """The logits of a made-up model, which depend on the entire path; `tied` gives few different values."""
    rng = random.Random(str(list(path)))
    return torch.tensor([float(rng.randrange(3)) if tied else rng.gauss(0, 3) for _ in range(VOCAB)])


class PathModel:
    """Gives the logits that `grow` requests; asserts that parents precede children and rows are contiguous."""

    def __init__(self, rows: Sequence[Row], levels: int = 99, tied: bool = False) -> None:
        self.rows = rows
        self.levels = levels  # the number of levels that fit into the cache
        self.tied = tied
        self.read: set[tuple[int, int]] = {(row, 0) for row in range(len(rows))}
        self.passes: list[set[tuple[int, tuple[int, ...]]]] = []  # the paths read, by row

    def __call__(self, places: Sequence[NodeToExpand]) -> Tensor | None:
        if self.levels == 0:
            return None
        self.levels -= 1
        assert [place.row for place in places] == sorted(place.row for place in places)
        found = []
        self.passes.append(set())
        for place in places:
            tree, node, path = place.growing.tree, place.node, []
            assert (place.row, node) not in self.read
            assert (place.row, tree.parents[node]) in self.read
            while node:
                path.append(tree.tokens[node])
                node = tree.parents[node]
            found.append(logits_after([*self.rows[place.row].text, *path[::-1]], tied=self.tied))
            self.passes[-1].add((place.row, tuple(path[::-1])))
        self.read |= {(place.row, place.node) for place in places}
        return torch.stack(found)


def grow(rows: Sequence[Row], budgets: Sequence[Budget], draws: Draws, levels: int = 99) -> Draft:
    """The draft of these rows."""
    drafted = [row for row, budget in zip(rows, budgets, strict=True) if budget.depth]
    logits = torch.stack([logits_after(row.text) for row in drafted]) if drafted else torch.empty(0, VOCAB)
    return grow_trees(draws, budgets, logits, PathModel(rows, levels))


def make_rows(count: int) -> list[Row]:
    """Short texts of different lengths."""
    return [Row(10 + i, [1, 2, 3, 4, 5][: 1 + (i * 3) % 5]) for i in range(count)]


@given(budgets=st.lists(BUDGETS, min_size=1, max_size=4), mode=MODES)
@settings(max_examples=150, deadline=None)
def test_every_node_is_what_its_parents_law_and_noise_give(budgets: list[Budget], mode: tuple[float, bool]) -> None:
    temperature, rejection = mode
    rows = make_rows(len(budgets))
    draws = draws_of(rows, VOCAB, temperature=temperature, rejection=rejection)
    draft = grow(rows, budgets, draws)
    tree, survival = draft.tree, draft.survival
    assert (survival is None) == all(budget.width == 1 and budget.min_survival == 0 for budget in budgets)
    children, paths, depths = tree.children().tolist(), tree.path_tokens().tolist(), tree.depths()
    assert tree.tokens[:, 0].tolist() == [row.text[-1] for row in rows]
    assert tree.depth == int(depths.max())
    for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        assert int(tree.valid[b].sum()) - 1 <= budget.nodes
        assert int(depths[b].max()) <= min(budget.depth, tree.depth)
        for node in tree.valid[b].nonzero()[:, 0].tolist():
            path = [token for token in paths[b][node] if token >= 0]
            below = [c for c in children[b][node] if c >= 0]
            assert len(below) <= budget.width
            if not below:
                continue
            assert survival is None or survival[b, node] >= budget.min_survival
            assert survival is None or rejection or survival[b, below].min() >= budget.min_survival
            at = draws.roots()
            for token in path:  # every row takes the same steps; only row b is compared
                at = draws.advance(at, torch.arange(len(rows)), torch.full((len(rows),), token))
            logits = logits_after([*row.text, *path]).expand(len(rows), VOCAB)
            drawn = draws.children(logits, at, budget.width)
            assert [int(tree.tokens[b, c]) for c in below] == drawn.tokens[b, : len(below)].tolist()
            assert drawn.survival is not None
            if survival is not None:
                expected = survival[b, node] * drawn.survival[b, : len(below)]
                torch.testing.assert_close(survival[b, below], expected, rtol=1e-5, atol=1e-7)
            if rejection and temperature:
                assert tree.q is not None
                assert drawn.law is not None
                assert torch.equal(tree.q.probs[tree.q.row[b, node]], drawn.law[b])
        for level in range(tree.depth if rejection else 0):
            nodes = [n for n in tree.valid[b].nonzero()[:, 0].tolist() if depths[b, n] == level]
            if survival is not None:
                nodes.sort(key=lambda n: -survival[b, n].item())  # stable, as the growing is
            counts = [sum(c >= 0 for c in children[b][n]) for n in nodes]
            assert counts == sorted(counts, reverse=True), "likelier nodes have no fewer children"
    assert (tree.q is not None) == (rejection and any(b.depth for b in budgets))
    if tree.q is not None:
        num_declared = (tree.q.row >= 0).sum().item()
        inner = sum(any(c >= 0 for c in below) for row_children in children for below in row_children)
        assert num_declared == (inner if temperature else 0)


@given(budgets=st.lists(BUDGETS, min_size=2, max_size=4), mode=MODES)
@settings(max_examples=50, deadline=None)
def test_a_row_does_not_depend_on_its_batch_mates(budgets: list[Budget], mode: tuple[float, bool]) -> None:
    temperature, rejection = mode
    rows = make_rows(len(budgets))
    together = grow(rows, budgets, draws_of(rows, VOCAB, temperature=temperature, rejection=rejection))
    for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        alone = grow([row], [budget], draws_of([row], VOCAB, temperature=temperature, rejection=rejection))
        nodes = alone.tree.tokens.shape[1]
        assert torch.equal(together.tree.tokens[b, :nodes], alone.tree.tokens[0])
        assert torch.equal(together.tree.parents[b, :nodes], alone.tree.parents[0])
        assert not together.tree.valid[b, nodes:].any()


@given(depth=st.integers(1, 6), width=st.integers(1, 4), extra=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_without_min_survival_the_depth_is_reached_and_nodes_are_spread(depth: int, width: int, extra: int) -> None:
    """In rejection modes the shape is fixed before tokens are drawn."""
    rows = make_rows(1)
    draft = grow(rows, [Budget(depth, width, depth + extra)], draws_of(rows, VOCAB, temperature=1.0, rejection=True))
    per_level = torch.bincount(draft.tree.depths()[0])[1:].tolist()
    assert len(per_level) == depth
    assert per_level[0] == min(width, -(-(depth + extra) // depth))
    if width == 1 or extra == 0:
        assert per_level == [1] * depth


def test_with_a_full_cache_a_tree_of_fixed_shape_keeps_what_was_drawn() -> None:
    rows = make_rows(2)
    budgets = [Budget(4, 2, 8), Budget(3)]
    full = grow(rows, budgets, draws_of(rows, VOCAB, rejection=True))
    for levels in range(4):
        cut = grow(rows, budgets, draws_of(rows, VOCAB, rejection=True), levels).tree
        assert cut.depth == levels + 1
        kept = full.tree.depths() <= cut.depth
        assert torch.equal(cut.tokens, torch.where(kept, full.tree.tokens, -1)[:, : cut.tokens.shape[1]])


def test_with_a_full_cache_the_best_drawn_nodes_are_kept() -> None:
    """As if the budget had no more depth."""
    rows = make_rows(2)
    for levels in range(4):
        cut = grow(rows, [Budget(4, 2, 8), Budget(3)], draws_of(rows, VOCAB, temperature=1.0), levels)
        depth = levels + 1
        asked = [Budget(min(4, depth), 2, 8), Budget(min(3, depth))]
        expected = grow(rows, asked, draws_of(rows, VOCAB, temperature=1.0))
        assert_same(cut, expected)
        assert cut.tree.depth == expected.tree.depth


Tree = dict[tuple[int, ...], float]  # survival by path, in the order in which paths are drawn level by level


def all_paths(draws: Draws, row: int, text: Sequence[int], budget: Budget, tied: bool) -> Tree:
    """Every path that the budget's depth, width and min_survival allow."""
    found: Tree = {}
    level: Tree = {(): 1.0}
    for _ in range(budget.depth):
        paths = list(level)
        if not paths:
            break
        logits = torch.stack([logits_after([*text, *path], tied=tied) for path in paths])
        offer = draws.offer(logits, [row] * len(paths), paths, budget.width)
        assert offer.survival is not None
        level = {
            (*path, token): level[path] * chance
            for path, tokens, chances in zip(paths, offer.tokens, offer.survival, strict=True)
            for token, chance in zip(tokens, chances, strict=True)
            if token >= 0 and level[path] * chance >= budget.min_survival
        }
        found |= level
    return found


def best_of(paths: Tree, nodes: int, depth: int) -> Tree:
    """The likeliest of at most this depth, those drawn first among equals."""
    allowed = [path for path in paths if len(path) <= depth]
    best = sorted(allowed, key=lambda path: -paths[path])[:nodes]  # stable
    return {path: paths[path] for path in allowed if path in best}


@given(
    budgets=st.lists(
        st.builds(
            Budget,
            depth=st.integers(0, 4),
            width=st.integers(1, 3),
            nodes=st.integers(1, 14),
            min_survival=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
        ),
        min_size=1,
        max_size=3,
    ),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    tied=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_trees_are_the_likeliest_paths_of_all(budgets: list[Budget], temperature: float, tied: bool, seed: int) -> None:
    """The tree and its passes are compared with a search of all paths; no node is read in vain.

    A pass reads the nodes of one depth that are among the best paths of at most that depth. If the tree is full, the
    least likely of these, and those equal to it, are not read, since no child of theirs could enter the tree.
    """
    rows = make_rows(len(budgets))
    draws = draws_of(rows, VOCAB, temperature=temperature, seed=seed)
    model = PathModel(rows, tied=tied)
    drafted = [row for row, budget in zip(rows, budgets, strict=True) if budget.depth]
    logits = torch.stack([logits_after(r.text, tied=tied) for r in drafted]) if drafted else torch.empty(0, VOCAB)
    draft = grow_trees(draws, budgets, logits, model)
    path_tokens = draft.tree.path_tokens().tolist()
    read: list[set[tuple[int, tuple[int, ...]]]] = [set() for _ in range(4)]
    for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        found = [tuple(t for t in path if t >= 0) for path in path_tokens[b]]
        found = [path for node, path in enumerate(found) if node and draft.tree.valid[b, node]]
        priced = any(other.width > 1 or other.min_survival for other in budgets)
        paths = all_paths(draws, b, row.text, budget, tied)
        expected = best_of(paths, budget.nodes, budget.depth)
        if not priced:  # chains, for which no survival is requested
            assert draft.tree.width == 1
            assert found == list(paths)[: budget.nodes]
            continue
        assert found == list(expected)
        assert draft.survival is not None
        torch.testing.assert_close(
            draft.survival[b, 1 : 1 + len(found)], torch.tensor([*expected.values()]), rtol=1e-6, atol=0
        )
        for depth in range(1, budget.depth):
            best = best_of(paths, budget.nodes, depth)
            least = min(best.values()) if len(best) == budget.nodes else -1.0
            read[depth - 1] |= {(b, path) for path, s in best.items() if len(path) == depth and s > least}
    if priced:
        assert model.passes == [level for level in read if level]
        assert len(model.passes) < max(1, *(budget.depth for budget in budgets))


@given(paths=shapes(), depth=st.integers(0, 5), mode=MODES, other=BUDGETS)
@settings(max_examples=100, deadline=None)
def test_a_static_tree_has_its_shape(
    paths: list[RankPath], depth: int, mode: tuple[float, bool], other: Budget
) -> None:
    """The tree has the tokens of its ranks, cut at the budget's depth; another row in the batch has another budget."""
    temperature, rejection = mode
    rows, shape = make_rows(2), StaticTree(paths)
    budget = Budget.of(Speculation(tree=shape), depth)
    expected = [path for path in shape.paths if len(path) <= depth]
    assert (budget == NO_DRAFT) == (not expected)
    draws = draws_of(rows, VOCAB, temperature=temperature, rejection=rejection)
    tree = grow(rows, [other, budget], draws).tree
    found: dict[int, RankPath] = {0: ()}
    drawn: dict[int, list[int]] = {}
    for node in tree.valid[1].nonzero()[1:, 0].tolist():
        parent = int(tree.parents[1, node])
        if parent not in drawn:
            path = [token for token in tree.path_tokens()[1, parent].tolist() if token >= 0]
            offer = draws.offer(logits_after([*rows[1].text, *path])[None], [1], [path], 4, survival=True)
            drawn[parent] = list(offer.tokens[0])
        found[node] = (*found[parent], drawn[parent].index(int(tree.tokens[1, node])))
    assert list(found.values())[1:] == expected
    assert len(expected) == (budget.nodes if expected else 0)
    if rejection and expected:
        assert tree.q is not None
        for node, ranked in found.items():
            ranks = [other[-1] for other in expected if other[:-1] == ranked]
            in_turn = ranks == list(range(len(ranks))) and bool(ranks) and temperature > 0
            assert (tree.q.row[1, node] >= 0) == in_turn, "a law is declared if all tokens drawn from it are there"
