"""DraftTree: what is derived from the two integer tensors agrees with walking the tree by hand."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.tree import DraftLaw, DraftTree, HostTree

VOCAB = 7


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Ragged batches of random trees, padding anywhere, bounds exact or too generous."""
    nodes = draw(st.integers(1, 8))
    rows = draw(st.lists(st.lists(st.integers(-1, 6), min_size=nodes - 1, max_size=nodes - 1), min_size=1, max_size=4))
    tokens, parents = [], []
    for row in rows:
        token, parent = [draw(st.integers(0, VOCAB - 1))], [-1]
        for node, choice in enumerate(row, start=1):
            above = choice % node if choice >= 0 else -1
            free = [t for t in range(VOCAB) if (above, t) not in zip(parent, token, strict=True)]
            alive = above >= 0 and token[above] >= 0 and free
            token.append(draw(st.sampled_from(free)) if alive else -1)
            parent.append(above if alive else -1)
        tokens.append(token)
        parents.append(parent)
    depth = max(len(climb(p, node)) - 1 for p in parents for node in range(nodes))
    width = max((p.count(node) for p in parents for node in range(nodes)), default=1)
    spare = draw(st.integers(0, 1))
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), depth=depth + spare, width=max(width, 1) + spare)


def climb(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@settings(max_examples=200, deadline=None)
@given(trees())
def test_depths_paths_and_children_agree_with_walking_by_hand(tree: DraftTree) -> None:
    depths, paths, texts, children = tree.depths(), tree.paths(), tree.path_tokens(), tree.children()
    for b, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        for node in range(len(tokens)):
            path = climb(parents, node)
            assert depths[b, node] == len(path) - 1
            assert paths[b, node].tolist() == path + [-1] * (tree.depth + 1 - len(path))
            text = [tokens[i] for i in path[1:]]
            assert texts[b, node].tolist() == text + [-1] * (tree.depth - len(text))
            below = [i for i, parent in enumerate(parents) if parent == node]
            assert children[b, node].tolist() == below + [-1] * (tree.width - len(below))
            assert tree.valid[b, node] == (tokens[node] >= 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_chains_end_at_the_first_missing_draft_token(draft_tokens: list[list[int]]) -> None:
    roots = torch.arange(len(draft_tokens))
    tree = DraftTree.chains(roots, torch.tensor(draft_tokens))
    for b, row in enumerate(draft_tokens):
        length = row.index(-1) if -1 in row else 3
        assert tree.tokens[b].tolist() == [b, *row[:length]] + [-1] * (3 - length)
        assert tree.parents[b].tolist() == [-1, *range(length)] + [-1] * (3 - length)
    assert (tree.depth, tree.width) == (3, 1)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4))
def test_chains_of_texts_are_chains(texts: list[list[int]]) -> None:
    """As from tensors of roots and padded draft tokens."""
    deepest = max(map(len, texts), default=1) - 1
    roots = torch.tensor([text[0] for text in texts], dtype=torch.long)
    padded = [[*text[1:], *[-1] * (deepest + 1 - len(text))] for text in texts]
    expected = DraftTree.chains(roots, torch.tensor(padded, dtype=torch.long).view(len(texts), deepest))
    tree = DraftTree.of_texts(texts)
    assert torch.equal(tree.tokens, expected.tokens)
    assert torch.equal(tree.parents, expected.parents)
    assert (tree.depth, tree.width) == (expected.depth, expected.width)


def test_a_bare_tree_and_chains_of_no_draft_tokens_are_roots() -> None:
    roots = torch.tensor([4, 2])
    for tree in (DraftTree.bare(roots), DraftTree.chains(roots, torch.empty(2, 0, dtype=torch.int64))):
        assert tree.tokens.tolist() == [[4], [2]]
        assert tree.depths().tolist() == [[0], [0]]
        assert tree.paths().tolist() == [[[0]], [[0]]]
        assert tree.path_tokens().shape == (2, 1, 0)
        assert tree.children().tolist() == [[[-1]], [[-1]]]


def test_a_sparse_distribution_is_spread_over_the_vocabulary() -> None:
    law = DraftLaw(torch.tensor([[0]]), torch.tensor([[0.25, 0.75]]), ids=torch.tensor([[4, 1]]))
    assert law.dense(6).tolist() == [[0.0, 0.75, 0.0, 0.0, 0.25, 0.0]]
    whole = DraftLaw(torch.tensor([[0]]), torch.tensor([[0.25, 0.75]]))
    assert whole.dense(2) is whole.probs


def test_a_tree_without_its_distribution_keeps_its_tokens() -> None:
    tree = DraftTree.chains(
        torch.tensor([1]), torch.tensor([[2]]), q=DraftLaw(torch.tensor([[0, -1]]), torch.ones(1, 1))
    )
    judged_by_match = tree.without_law()
    assert judged_by_match.q is None
    assert torch.equal(judged_by_match.tokens, tree.tokens)
    assert tree.q is not None


def test_host_copies_of_a_tree_are_not_reused_for_a_pruned_one() -> None:
    tree = DraftTree.of_texts([[1, 2, 3]]).to(torch.device("cpu"))
    pruned = replace(tree, tokens=torch.tensor([[1, 2, -1]]), parents=torch.tensor([[-1, 0, -1]])).without_law()
    assert pruned.host() == [HostTree([1, 2], [-1, 0])]
    unseen = replace(tree, known=[HostTree.unseen(2)]).without_law()
    assert unseen.known == [HostTree.unseen(2)]


def test_a_selection_of_trees_keeps_their_distributions() -> None:
    tokens = torch.tensor([[7, 11, 12], [9, 21, -1], [5, 6, 7]])
    parents = torch.tensor([[-1, 0, 1], [-1, 0, -1], [-1, 0, 1]])
    law = DraftLaw(torch.tensor([[0, 1, -1], [2, -1, -1], [3, 4, -1]]), torch.eye(5))
    some = DraftTree(tokens, parents, depth=2, q=law).to(torch.device("cpu")).select([2, 0])
    assert some.tokens.tolist() == [[5, 6, 7], [7, 11, 12]]
    assert some.q is not None
    assert some.q.row.tolist() == [[3, 4, -1], [0, 1, -1]]
    assert torch.equal(some.q.probs, law.probs)
    assert [tree.tokens for tree in some.host()] == [[5, 6, 7], [7, 11, 12]]
